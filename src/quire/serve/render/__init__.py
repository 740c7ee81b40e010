"""Render: what the engine has generated becomes an answer, in one piece or as a stream of events."""
