"""Folders of quantised safetensors: gives each method's matrices their usual names and dequantised numbers."""
