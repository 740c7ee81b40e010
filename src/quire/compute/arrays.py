"""Names for the array types that modules of the compute plane pass to each other."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32]
HalfArray: TypeAlias = NDArray[np.uint16]
"""bfloat16, for which numpy has no type: its 16 bits."""
IntArray: TypeAlias = NDArray[np.int64]
Logits: TypeAlias = Any
"""Rows of logits in the memory of their runner: a `FloatArray`, or a tensor on a device. The sampler knows which."""
BoolArray: TypeAlias = NDArray[np.bool_]
ByteArray: TypeAlias = NDArray[np.uint8]
MaskArray: TypeAlias = NDArray[np.uint32]
"""A bit for each token."""
WeightArray: TypeAlias = NDArray[Any]
"""A loaded weight: a `FloatArray`, or a `HalfArray` if matrices are bfloat16."""
