"""The image encoders of GGUF files, each family in its own module, in the forms of llama.cpp and of Ollama."""
