"""The reference decoder: a complete model in readable numpy, the oracle for all kernels."""

from quire.compute.reference.load import load_parts

__all__ = ["load_parts"]
