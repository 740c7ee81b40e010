"""Paged attention on the device: one protocol (`base`), and a file for each way to compute it."""
