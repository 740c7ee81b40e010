"""Engines on the machines of a Ray cluster. Only this folder imports Ray."""
