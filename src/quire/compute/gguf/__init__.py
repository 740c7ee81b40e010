"""GGUF: one file with a model's settings, its tokenizer and its tensors, as llama.cpp writes it."""
