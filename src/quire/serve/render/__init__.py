"""Render: turns the engine's output into an answer, in one piece or as a stream of events."""
