"""Chooses tokens from logits: one definition (`draws`), a reference in numpy and a native sampler."""
