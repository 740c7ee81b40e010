"""Block types: the formats in which GGUF packs numbers, and their conversion to float32.

A row is cut into blocks of 32, 64 or 256 numbers; a block has a scale in float16 and small integers, and the K types
also have a scale of 4 or 6 bits for each 16 or 32 numbers. `widen` returns the same float32 numbers as llama.cpp's
definition, bit for bit: products of a scale and a code are exact, and a sum rounds once.

    N        the nibble of element j of 32: the low half of byte j, from 16 on the high half of byte j - 16
    d, m     the scale and the minimum, float16
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray, FloatArray
from quire.compute.gguf import grid_blocks
from quire.compute.gguf.grid_blocks import GRID_TYPES
from quire.compute.weights.bfloat16 import widened
from quire.compute.weights.block_fields import MXFP4_BYTES, are_mxfp4, are_nvfp4, nvfp4_blocks
from quire.compute.weights.small_floats import E4M3, TWICE_E2M1

NVFP4_BYTES: Final = 36
MXFP4_SCALES: Final = np.ldexp(np.float32(1), np.arange(256) - 128).astype(np.float32)
"""Half the scale that a byte represents, because codes are twice the weights; 255 is a number here."""

Widen = Callable[[ByteArray], FloatArray]
"""Blocks as bytes `[num_blocks, num_bytes]` → numbers `[num_blocks, size]`."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A format that packs `size` numbers into `num_bytes`."""

    name: str
    size: int
    num_bytes: int
    widen: Widen


def _float16(blocks: ByteArray, at: int) -> FloatArray:
    """Return the float16 at an offset of each block, `[num_blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: ByteArray) -> ByteArray:
    """Return the low halves of the bytes, then the high halves, along the last axis."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _bits(blocks: ByteArray, at: int) -> ByteArray:
    """Return the 32 bits of the number at an offset of each block, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(blocks[:, at : at + 4]), axis=1, bitorder="little")


def _float32(blocks: ByteArray) -> FloatArray:
    return np.ascontiguousarray(blocks).view("<f4")


def _half(blocks: ByteArray) -> FloatArray:
    return np.ascontiguousarray(blocks).view("<f2").astype(np.float32)


def _bfloat16(blocks: ByteArray) -> FloatArray:
    return widened(np.ascontiguousarray(blocks).view("<u2"))


def _q4_0(blocks: ByteArray) -> FloatArray:
    return _float16(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - np.float32(8))


def _q4_1(blocks: ByteArray) -> FloatArray:
    return _float16(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _float16(blocks, 2)


def _q5_0(blocks: ByteArray) -> FloatArray:
    codes = _nibbles(blocks[:, 6:]) | _bits(blocks, 2) << 4
    return _float16(blocks, 0) * (codes.astype(np.float32) - np.float32(16))


def _q5_1(blocks: ByteArray) -> FloatArray:
    codes = _nibbles(blocks[:, 8:]) | _bits(blocks, 4) << 4
    return _float16(blocks, 0) * codes.astype(np.float32) + _float16(blocks, 2)


def _q8_0(blocks: ByteArray) -> FloatArray:
    return _float16(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


CURVE: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The numbers that the sixteen codes of IQ4 represent: closer together around zero."""


def _curved(packed: ByteArray) -> FloatArray:
    values: FloatArray = np.array(CURVE, np.float32)[_nibbles(packed)]
    return values


def _mxfp4(blocks: ByteArray) -> FloatArray:
    codes: FloatArray = TWICE_E2M1[_nibbles(blocks[:, 1:])].astype(np.float32)
    with np.errstate(over="ignore"):
        return MXFP4_SCALES[blocks[:, :1]] * codes


def check_mxfp4(rows: ByteArray) -> None:
    """Raise `ValueError` if engines cannot have the scale of a block of MXFP4 that is not all zeros."""
    blocks = rows.reshape(-1, MXFP4_BYTES)
    if not are_mxfp4(blocks[:, 0]) and not are_mxfp4(blocks[(blocks[:, 1:] & 0x77).any(axis=1), 0]):
        raise ValueError("scales that do not fit into float16")


def _nvfp4(blocks: ByteArray) -> FloatArray:
    return nvfp4_numbers(blocks, np.float32(1))


def nvfp4_numbers(blocks: ByteArray, factor: np.float32) -> FloatArray:
    """Return the numbers in blocks of NVFP4, `[num_blocks, bytes]`, of a matrix with a factor."""
    with np.errstate(over="ignore", invalid="ignore"):  # factors that are not finite show in the weights
        scales = E4M3[blocks[:, :4]] * (factor * np.float32(0.5))
        numbers: FloatArray = _twice_e2m1_by_sixteens(blocks) * scales[:, :, None]
    return numbers.reshape(-1, 64)


def packed_nvfp4(rows: ByteArray, factor: np.float32) -> ByteArray:
    """Return rows of blocks of NVFP4 as quire's own blocks, which have the factor of the matrix, halved.

    Raises `ValueError` if these cannot have the scales or the factor.
    """
    blocks = rows.reshape(-1, NVFP4_BYTES)
    twice, scales = _twice_e2m1_by_sixteens(blocks), blocks[:, :4]
    with np.errstate(over="ignore", invalid="ignore"):
        half = factor * np.float32(0.5)
    if not are_nvfp4(scales, half):
        raise ValueError("scales below 0 or no numbers, or a factor of 256 and more")
    return nvfp4_blocks(twice.reshape(len(rows), -1), scales.reshape(len(rows), -1), half)


def _twice_e2m1_by_sixteens(blocks: ByteArray) -> NDArray[np.int8]:
    """Return twice the numbers in blocks of NVFP4 before they are scaled, `[num_blocks, 4, 16]`."""
    packed = blocks[:, 4:].reshape(-1, 4, 8)
    numbers: NDArray[np.int8] = TWICE_E2M1[np.concatenate([packed & 15, packed >> 4], axis=2)]
    return numbers


def _iq4_nl(blocks: ByteArray) -> FloatArray:
    return _float16(blocks, 0) * _curved(blocks[:, 2:])


def _iq4_xs(blocks: ByteArray) -> FloatArray:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2").astype(np.int32)  # two bits of each scale
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=2).reshape(-1, 8)
    scales = (low | ((high >> np.arange(0, 16, 2)) & 3) << 4).astype(np.float32) - np.float32(32)
    groups: FloatArray = (_float16(blocks, 0) * scales)[:, :, None] * _curved(blocks[:, 8:].reshape(-1, 8, 16))
    return groups.reshape(-1, 256)


def _six_bits(packed: ByteArray) -> tuple[FloatArray, FloatArray]:
    """Return the scales and the minima of eight groups, six bits each in twelve bytes (Q4_K, Q5_K)."""
    first, second, third = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _k_groups(blocks: ByteArray, codes: ByteArray) -> FloatArray:
    """Return the numbers of blocks with a scale and a minimum for each group of 32; `codes` `[num_blocks, 8, 32]`."""
    scales, minima = _six_bits(blocks[:, 4:16])
    scale = (_float16(blocks, 0) * scales)[:, :, None]
    minimum = (_float16(blocks, 2) * minima)[:, :, None]
    return (scale * codes.astype(np.float32) - minimum).reshape(-1, 256)


def _pairs_of_groups(packed: ByteArray) -> ByteArray:
    """Return the nibbles of 128 bytes as eight groups of 32: for each 32 bytes the low halves, then the high halves."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: ByteArray) -> FloatArray:
    return _k_groups(blocks, _pairs_of_groups(blocks[:, 16:]))


def _q5_k(blocks: ByteArray) -> FloatArray:
    fifth = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & np.uint8(1)
    return _k_groups(blocks, _pairs_of_groups(blocks[:, 48:]) | fifth << np.uint8(4))


def _q6_k(blocks: ByteArray) -> FloatArray:
    low, two = blocks[:, :128].reshape(-1, 2, 2, 32), _two_bits(blocks[:, 128:192])
    four = np.concatenate([low & 15, low >> 4], axis=2)  # [num_blocks, 2, 4, 32]
    codes = (four | two << 4).astype(np.float32) - np.float32(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return _by_sixteens(_float16(blocks, 208) * scales, codes)


def _by_sixteens(scales: FloatArray, codes: FloatArray) -> FloatArray:
    """Return codes, 256 per block, times the scale of each group of 16."""
    return (scales[:, :, None] * codes.reshape(-1, 16, 16)).reshape(-1, 256)


def _two_bits(packed: ByteArray) -> ByteArray:
    """Return the codes in 64 bytes: for each 32 bytes the lowest two bits, then the next … `[num_blocks, 2, 4, 32]`."""
    return packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)


def _q2_k(blocks: ByteArray) -> FloatArray:
    codes = _two_bits(blocks[:, 16:80]).astype(np.float32).reshape(-1, 16, 16)
    scale = (_float16(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32))[:, :, None]
    minimum = (_float16(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32))[:, :, None]
    return (scale * codes - minimum).reshape(-1, 256)


def _q3_k(blocks: ByteArray) -> FloatArray:
    third = (blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [num_blocks, 8, 32]
    codes = (_two_bits(blocks[:, 32:96]).reshape(-1, 8, 32) | third << 2).astype(np.float32) - np.float32(4)
    packed = blocks[:, 96:108]
    low = np.concatenate([packed[:, :8] & 15, packed[:, :8] >> 4], axis=1)
    high = (packed[:, None, 8:12] >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    scales = (low | high.reshape(-1, 16) << 4).astype(np.float32) - np.float32(32)
    return _by_sixteens(_float16(blocks, 108) * scales, codes)


_GRIDS: Final = MappingProxyType(
    {
        **{16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M"},
        **{34: "TQ1_0", 35: "TQ2_0"},
    }
)
BLOCK_TYPES: Final = MappingProxyType(
    {
        0: BlockType("F32", 1, 4, _float32),
        1: BlockType("F16", 1, 2, _half),
        2: BlockType("Q4_0", 32, 18, _q4_0),
        3: BlockType("Q4_1", 32, 20, _q4_1),
        6: BlockType("Q5_0", 32, 22, _q5_0),
        7: BlockType("Q5_1", 32, 24, _q5_1),
        8: BlockType("Q8_0", 32, 34, _q8_0),
        10: BlockType("Q2_K", 256, 84, _q2_k),
        11: BlockType("Q3_K", 256, 110, _q3_k),
        12: BlockType("Q4_K", 256, 144, _q4_k),
        13: BlockType("Q5_K", 256, 176, _q5_k),
        14: BlockType("Q6_K", 256, 210, _q6_k),
        **{
            number: BlockType(name, grid_blocks.SIZE, GRID_TYPES[name].num_bytes, GRID_TYPES[name].widen)
            for number, name in _GRIDS.items()
        },
        20: BlockType("IQ4_NL", 32, 18, _iq4_nl),
        23: BlockType("IQ4_XS", 256, 136, _iq4_xs),
        30: BlockType("BF16", 1, 2, _bfloat16),
        39: BlockType("MXFP4", 32, MXFP4_BYTES, _mxfp4),
        40: BlockType("NVFP4", 64, NVFP4_BYTES, _nvfp4),
    }
)
"""The number of a type in a file → the type."""
