"""The reference decoder: a whole model in numpy, written to be read; the oracle of all kernels."""

from quire.compute.reference.load import load_parts

__all__ = ["load_parts"]
