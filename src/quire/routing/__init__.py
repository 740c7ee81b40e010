"""Routing: chooses which of several engines gets a request. Used by the server and by the simulator."""
