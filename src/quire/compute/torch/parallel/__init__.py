"""Tensor parallel: several processes hold the shards of one model and compute each step together."""
