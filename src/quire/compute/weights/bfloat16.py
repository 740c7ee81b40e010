"""bfloat16 without a library: the upper 16 bits of a float32.

Widening is a shift, and exact. Narrowing rounds to the nearest, ties to even, as every framework does. Numbers
above the largest become infinite, and NaN stays NaN.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray, HalfArray, WeightArray

CHUNK: Final = 1 << 16  # numbers rounded at a time: intermediate results stay in a processor cache
HALVES: Final = np.arange(1 << 16, dtype=np.uint16)  # the bits of every float16


def widened(bits: HalfArray) -> FloatArray:
    """Return the numbers as float32.

    >>> widened(np.array([0x3F80, 0xC000], np.uint16))
    array([ 1., -2.], dtype=float32)
    """
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers: WeightArray) -> HalfArray:
    """Return an array of float32 or float16 as bfloat16.

    >>> [hex(bits) for bits in narrowed(np.array([1.0, -2.0, 3.4e38], np.float32))]
    ['0x3f80', '0xc000', '0x7f80']
    """
    flat = numbers.reshape(-1)
    result = np.empty(len(flat), np.uint16)
    if flat.dtype == np.float16 and len(flat) > len(HALVES):
        of_halves = narrowed(HALVES.view(np.float16))
        for start in range(0, len(flat), CHUNK):
            part = flat[start : start + CHUNK]
            # "wrap" changes nothing here; with "raise", numpy would fill a copy of the result first.
            np.take(of_halves, part.view(np.uint16), out=result[start : start + CHUNK], mode="wrap")
        return result.reshape(numbers.shape)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK].astype(np.float32, copy=False)
        bits = part.view(np.uint32)
        rounded = bits >> 16
        rounded &= 1
        rounded += bits
        rounded += 0x7FFF
        rounded >>= 16
        if (nan := np.isnan(part)).any():
            rounded[nan] = bits[nan] >> 16 | 0x40
        result[start : start + CHUNK] = rounded
    return result.reshape(numbers.shape)
