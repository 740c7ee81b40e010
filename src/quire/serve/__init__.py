"""The server, for clients of OpenAI, Anthropic and Ollama. Only this folder imports the web framework."""
