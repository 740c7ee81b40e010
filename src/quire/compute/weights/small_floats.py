"""Floats of 4 and 8 bits, as tables: the number that each code represents.

    e2m1    a sign, 2 bits of exponent, 1 of mantissa: twice the number is an integer
    e4m3    a sign, 4 bits of exponent, 3 of mantissa
    e8m0    a power of two

None of them has an infinity.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray, FloatArray

TWICE_E2M1: Final = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
TWICE_VALUES: Final = range(-12, 13)
"""The range of twice the numbers of e2m1."""
CODE_OF_TWICE: Final = np.zeros(len(TWICE_VALUES), np.uint8)
CODE_OF_TWICE[TWICE_E2M1[::-1].astype(np.intp) + 12] = np.arange(16, dtype=np.uint8)[::-1]
"""The first code of each of them, from -12 on; 0 for those that no code has."""
HALF_E8M0: Final = np.where(
    np.arange(256) < 255, np.ldexp(np.float32(1), np.arange(256) - 128), np.float32(np.nan)
).astype(np.float32)
"""Half the number of each byte: 2^(n - 128), NaN for 255."""


def e2m1_of(twice: NDArray[Any]) -> ByteArray:
    """Return the codes of numbers, given twice each; zero has no sign.

    >>> e2m1_of(np.array([12, -1, 0])).tolist()
    [7, 9, 0]
    """
    codes: ByteArray = CODE_OF_TWICE[np.add(twice, 12, dtype=np.intp)]
    return codes


def _e4m3() -> FloatArray:
    """Return the number that each of the 256 bytes represents: NaN if all bits except the sign are set; no infinity.

    >>> _e4m3()[[0x38, 0xB8, 0x01, 0x7E]].tolist()
    [1.0, -1.0, 0.001953125, 448.0]
    """
    byte = np.arange(256)
    exponent, mantissa = byte >> 3 & 15, (byte & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(mantissa + 8, exponent - 10))
    size[byte & 127 == 127] = np.nan
    return np.where(byte < 128, size, -size).astype(np.float32)


E4M3: Final = _e4m3()
