"""What an engine tells about itself: the report at its start, its counters, its step log, the live stream."""
