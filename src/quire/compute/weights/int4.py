"""Keys and values with 4 bits: x ≈ scale × n + minimum, with n from 0 to 15. A plain reference implementation.

Each head is first multiplied by a Hadamard matrix, which spreads a few large numbers over all numbers, so that one
scale fits them better. The matrix is its own inverse: products of rotated queries and rotated keys equal those of the
heads themselves, and the weighted sum of rotated values is rotated back.

A key has a scale and a minimum for each 32 numbers, a value for each head. Both are rounded to bfloat16 first; then n
is (x - minimum) × (1 / scale), rounded to the nearest, ties to even. If the numbers of a group are less than 15e-30
apart, the scale is 0. If a number is not finite, the scale is NaN, and so is every result from it: the error is
visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.weights.bfloat16 import narrowed, widened
from quire.compute.weights.quantize import SMALLEST, rounded_to_int8
from quire.core.kv_spec import INT4_GROUP

MOST: Final = np.float32(15)
Rounding: TypeAlias = Callable[[FloatArray], FloatArray]


def rotated(heads: FloatArray) -> FloatArray:
    """Return each row multiplied by a Hadamard matrix, divided by the root of its size.

    The matrix size is the largest power of two that divides the row length; each such part of a row is multiplied.

    >>> rotated(np.array([3.0, 1.0, 0.0, 0.0], np.float32)).tolist()
    [2.0, 1.0, 2.0, 1.0]
    """
    count = heads.shape[-1]
    size, half = count & -count, 1
    while half < size:
        pairs = heads.reshape(*heads.shape[:-1], -1, 2, half)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        heads = np.stack([low + high, low - high], axis=-2).reshape(heads.shape)
        half *= 2
    turned: FloatArray = heads * (np.float32(1) / np.sqrt(np.float32(size)))
    return turned


def quantized(numbers: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return n for each number, and the scale and the minimum of each row of the last dimension.

    >>> n, scales, minimums = quantized(np.array([1.0, 2.0, 4.75], np.float32))
    >>> n.tolist(), scales.tolist(), minimums.tolist()
    ([0.0, 4.0, 15.0], 0.25, 1.0)
    """
    finite = np.isfinite(numbers).all(axis=-1, keepdims=True)
    numbers = np.where(finite, numbers, np.float32(0))
    minimums = _as_bfloat16(numbers.min(axis=-1, keepdims=True))
    steps = (numbers.max(axis=-1, keepdims=True) - minimums) / MOST
    scales = np.where(steps < SMALLEST, np.float32(0), _as_bfloat16(steps))
    finite &= np.isfinite(scales) & np.isfinite(minimums)
    factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=finite & (scales > 0))
    n = np.rint(np.clip((numbers - minimums) * factors, np.float32(0), MOST))
    scales = np.where(finite, scales, np.float32(np.nan))
    return n, scales[..., 0], minimums[..., 0]


def rounded_to_int4(heads: FloatArray, group: int | None = None) -> FloatArray:
    """Return heads rounded as for 4 bits, with a scale for each row, or for each `group` of its numbers."""
    turned, size = rotated(heads), group or heads.shape[-1]
    for start in range(0, heads.shape[-1], size):
        n, scales, minimums = quantized(turned[..., start : start + size])
        turned[..., start : start + size] = n * scales[..., None] + minimums[..., None]
    return rotated(turned)


def _as_bfloat16(numbers: FloatArray) -> FloatArray:
    return widened(narrowed(numbers))


KV_ROUNDINGS: Final[Mapping[str, tuple[Rounding, Rounding]]] = MappingProxyType(
    {
        "int8": (rounded_to_int8, rounded_to_int8),
        "k8v4": (rounded_to_int8, rounded_to_int4),
        "int4": (partial(rounded_to_int4, group=INT4_GROUP), rounded_to_int4),
    }
)
"""The rounding of keys and values when they are written, by the dtype of the KV memory."""
