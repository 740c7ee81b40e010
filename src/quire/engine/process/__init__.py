"""Runs an engine in its own thread, or in a separate process that is monitored and restarted."""
