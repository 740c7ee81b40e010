"""Numbers as int8: x ≈ q × scale, with q from -127 to 127. A plain reference implementation.

    inputs      a scale for each group of 32 consecutive numbers of a row: a few large numbers cost only their own
                group precision; for products with codes (codes.py)
    KV memory   a scale for each key and each value of a token and head, set when it is written

The scale is 1/127 of the largest absolute value among the numbers that share it, and q = x × (127 / largest) is rounded
to the nearest, ties to even. If all numbers are below 1e-30 they count as zero. If a number is not finite, the scale is
NaN, and so is every result from it: the error is visible.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray

MOST: Final = np.float32(127)
SMALLEST: Final = np.float32(1e-30)


def quantized(numbers: FloatArray) -> tuple[NDArray[np.int8], FloatArray]:
    """Return numbers as int8, and the scale of each row of the last dimension.

    >>> q, scales = quantized(np.array([[1.0, -0.5, 0.25], [0.0, 0.0, 0.0]], np.float32))
    >>> q.tolist(), (scales * 127).tolist()
    ([[127, -64, 32], [0, 0, 0]], [1.0, 0.0])
    """
    highest = np.abs(numbers).max(axis=-1, keepdims=True)
    usable = np.isfinite(highest) & (highest >= SMALLEST)
    factor = np.divide(MOST, highest, out=np.zeros_like(highest), where=usable)
    scales = np.where(usable, highest / MOST, np.where(highest < SMALLEST, np.float32(0), np.float32(np.nan)))
    rounded = np.rint(np.where(usable, numbers, np.float32(0)) * factor)
    return rounded.astype(np.int8), scales[..., 0]


def rounded_to_int8(numbers: FloatArray) -> FloatArray:
    """Return numbers rounded as for int8, with a scale for each row of the last dimension.

    >>> (rounded_to_int8(np.array([1.0, -0.5], np.float32)) * 127).tolist()
    [127.0, -64.0]
    """
    q, scales = quantized(numbers)
    with np.errstate(over="ignore"):  # the largest float32 numbers become infinite
        return q * scales[..., None]
