"""Run: turns prompts into tokens and generates. Nothing here depends on the API that a client uses."""
