"""The server, for clients of OpenAI and Ollama. Only this folder imports the web framework."""
