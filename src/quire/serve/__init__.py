"""The OpenAI-compatible server: HTTP in, requests of an engine out. Only this folder imports the web framework."""
