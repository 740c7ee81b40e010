"""The records of an engine: the report at its start, its counters, its step log, the live stream."""
