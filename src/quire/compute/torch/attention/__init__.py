"""Paged attention on the device: one protocol (`base`), and one file for each implementation."""
