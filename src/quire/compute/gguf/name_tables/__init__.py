"""The names of tensors in GGUF files, by kind of family: a table for each architecture."""
