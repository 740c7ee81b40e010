"""Names for the array types that cross module borders inside the compute plane."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32]
HalfArray: TypeAlias = NDArray[np.uint16]
"""bfloat16, for which numpy has no type: its 16 bits."""
IntArray: TypeAlias = NDArray[np.int64]
Logits: TypeAlias = Any
"""Rows of logits where their runner left them: a `FloatArray`, or a tensor on a device. The sampler knows which."""
BoolArray: TypeAlias = NDArray[np.bool_]
ByteArray: TypeAlias = NDArray[np.uint8]
MaskArray: TypeAlias = NDArray[np.uint32]
"""A bit for each token."""
WeightArray: TypeAlias = NDArray[Any]
"""A weight as it was loaded: a `FloatArray`, or a `HalfArray` where matrices are bfloat16."""
