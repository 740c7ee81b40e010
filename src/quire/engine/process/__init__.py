"""Where an engine runs: in a thread of its own, or in a process of its own that is watched and restarted."""
