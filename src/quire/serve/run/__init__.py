"""Run: prompts become tokens, and the engine generates. Nothing here knows how a client writes or reads."""
