"""Folders of quantised safetensors: each method's matrices under their plain names, with the numbers they stand for."""
