"""The bytes of blocks of 32 codes, as GGUF lays them out, and quire's own blocks of NVFP4.

    4 bits    16 bytes: codes 0 to 15 in the low halves, 16 to 31 in the high ones
    5 bits    4 bytes with the fifth bits, then the others as above
    MXFP4     a scale (e8m0), codes of 4 bits as above: e2m1
    NVFP4     the factor of the matrix (float32), the scale of each 16 codes (e4m3), codes of 4 bits as above: e2m1

The factor is halved, because engines multiply twice the number of an e2m1. NVFP4 in GGUF files has other blocks.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray
from quire.compute.weights.small_floats import e2m1_of

SIZE: Final = 32
MXFP4_BYTES: Final = 17
NVFP4_BYTES: Final = 22
LEAST_SCALE: Final = 104
MOST_SCALE: Final = 143
NAN: Final = 0x7F
"""The first byte that is no number from 0 on in e4m3."""
MOST_FACTOR: Final = 128


def four_bits(codes: ByteArray) -> ByteArray:
    """Return the low four bits of codes, `[rows, blocks, 32]`, as bytes of blocks."""
    nibbles: ByteArray = codes[..., :16] & np.uint8(15) | codes[..., 16:] << np.uint8(4)
    return nibbles


def five_bits(codes: ByteArray) -> tuple[ByteArray, ByteArray]:
    """Return the fifth bits of codes, `[rows, blocks, 32]`, and the others, as bytes of blocks."""
    fifth = np.packbits(codes.reshape(-1) >> 4, bitorder="little")  # along an axis it takes five times as long
    return fifth.reshape(*codes.shape[:2], -1), four_bits(codes)


def are_mxfp4(scales: ByteArray) -> bool:
    """Return whether blocks of MXFP4 can have these scales; engines halve them, and a GPU has float16."""
    return not ((scales < LEAST_SCALE) | (scales > MOST_SCALE)).any()


def mxfp4_blocks(twice: NDArray[Any], scales: ByteArray) -> ByteArray:
    """Return rows of twice an e2m1 each, `[rows, in]`, with their scales, `[rows, in / 32]`, as blocks of MXFP4.

    >>> mxfp4_blocks(np.full((1, 32), -12), np.full((1, 1), 127, np.uint8))[0, :3].tolist()
    [127, 255, 255]
    """
    codes = e2m1_of(np.ascontiguousarray(twice)).reshape(len(twice), -1, SIZE)
    return np.concatenate([scales[:, :, None], four_bits(codes)], axis=2).reshape(len(codes), -1)


def are_nvfp4(scales: ByteArray, factor: np.float32) -> bool:
    """Return whether blocks of NVFP4 can have these scales and this factor; engines multiply both by powers of two."""
    return bool(abs(factor) < MOST_FACTOR) and not (scales >= NAN).any()


def nvfp4_blocks(twice: NDArray[Any], scales: ByteArray, factor: np.float32) -> ByteArray:
    """Return rows of twice an e2m1 each, `[rows, in]`, with their scales, `[rows, in / 16]`, as blocks of NVFP4.

    >>> nvfp4_blocks(np.full((1, 32), -12), np.full((1, 2), 0x38, np.uint8), np.float32(1))[0, 2:8].tolist()
    [128, 63, 56, 56, 255, 255]
    """
    codes = e2m1_of(np.ascontiguousarray(twice)).reshape(len(twice), -1, SIZE)
    factors = np.full((*codes.shape[:2], 1), factor, "<f4").view(np.uint8)
    fields = [factors, scales.reshape(*codes.shape[:2], 2), four_bits(codes)]
    return np.concatenate(fields, axis=2).reshape(len(codes), -1)
