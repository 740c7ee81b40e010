"""Where an engine runs: in its own thread, or in a separate process that is watched and restarted."""
