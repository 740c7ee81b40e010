"""Block types with one to three bits for each weight: IQ1, IQ2, IQ3, and TQ1 and TQ2.

A block of IQ has no code for each weight, but one for four or eight: its place in a grid, a list of the sizes that they
can have together. Signs are apart; in IQ1 all sizes of a group move up or down by an eighth instead.

    IQ1_S, IQ1_M                 8 of -1, 0, 1, each ± 1/8       a scale for 32 or 16 weights
    IQ2_XXS, IQ2_XS, IQ2_S       8 of 8, 25, 43, in eighths      for 32; for 16
    IQ3_XXS                      4 of 4 to 62, in quarters       for 32
    IQ3_S                        4 of 1 to 15                    for 32
    TQ1_0, TQ2_0                 -1, 0, 1; no grid               for 256

Engines have a code for each weight again, which is 2, 3 or 4 bits in memory. It counts the numbers of a table, and a
code's highest bit is its sign. All products of a scale and a number are exact in float32. The grids are in grids.bin,
two bytes for each entry, its first size in the lowest bits; a test compares them with those of the package gguf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray, FloatArray
from quire.compute.weights.codes import CODINGS

SIZE: Final = 256
AT_ONCE: Final = 2048
"""The most blocks that are read at once, so that what lies between is in a cache."""
GRIDS: Final = MappingProxyType(
    {
        "IQ1": (2048, 8),
        "IQ2_XXS": (256, 8),
        "IQ2_XS": (512, 8),
        "IQ2_S": (1024, 8),
        "IQ3_XXS": (256, 4),
        "IQ3_S": (512, 4),
    }
)
"""The grids in the order of the file → the entries of each, and the weights of an entry."""

_IQ3_XXS: Final = np.array([4, 12, 20, 28, 36, 44, 52, 62])
_IQ3_S: Final = np.arange(1, 16, 2)
NUMBERS: Final = MappingProxyType(
    {
        "TERNARY": np.arange(-2, 2),
        "IQ1": np.array([-7, 1, 9, 0, -9, -1, 7, 0]),
        "IQ2": np.array([8, 25, 43, 0, -8, -25, -43, 0]),
        "IQ3_XXS": np.concatenate([_IQ3_XXS, -_IQ3_XXS]),
        "IQ3_S": np.concatenate([_IQ3_S, -_IQ3_S]),
    }
)
"""Types of blocks that engines have → the number of each code."""
FACTORS: Final = MappingProxyType({"TERNARY": 1.0, "IQ1": 0.125, "IQ2": 0.125, "IQ3_XXS": 0.25, "IQ3_S": 1.0})
"""The factor of the numbers of a type."""


@dataclass(frozen=True, slots=True)
class Coded:
    """Blocks as codes: the float16 of each, as bytes; the scales of 16 or 32 weights; a code for each weight.

    Two codes are a byte, the first one in the lower half.
    """

    halves: ByteArray
    scales: NDArray[np.int8]
    pairs: ByteArray


@dataclass(frozen=True, slots=True)
class GridType:
    """A type in files, with `num_bytes` for 256 weights. `kept`: the type that engines have."""

    num_bytes: int
    kept: str
    read: Callable[[ByteArray], Coded]

    def widen(self, blocks: ByteArray) -> FloatArray:
        """Return the numbers in blocks, `[num_blocks, 256]`."""
        coded = self.read(blocks)
        codes = _halves_of(coded.pairs).reshape(len(blocks), coded.scales.shape[1], -1)
        groups = NUMBERS[self.kept].astype(np.int16)[codes]
        products: FloatArray = (groups * coded.scales[:, :, None].astype(np.int16)).astype(np.float32)
        return products.reshape(-1, SIZE) * (
            coded.halves.view("<f2").astype(np.float32) * np.float32(FACTORS[self.kept])
        )

    def own_blocks(self, rows: ByteArray) -> ByteArray:
        """Return rows of blocks as those of the compiled core: the float16, the scales, the codes."""
        blocks = rows.reshape(-1, self.num_bytes)
        own = np.empty((len(blocks), 2 + SIZE // CODINGS[self.kept].group + SIZE // 2), np.uint8)
        for start in range(0, len(blocks), AT_ONCE):
            coded = self.read(blocks[start : start + AT_ONCE])
            fields = [coded.halves, coded.scales.view(np.uint8), coded.pairs]
            np.concatenate(fields, axis=1, out=own[start : start + AT_ONCE])
        return own.reshape(len(rows), -1)


@functools.cache
def _grid(name: str) -> NDArray[Any]:
    """Return a grid: the sizes of each entry in four bits each, the first one in the lowest bits."""
    start, entries = 0, np.frombuffer(files(__package__).joinpath("grids.bin").read_bytes(), "<u2")
    for each, (count, length) in GRIDS.items():
        if each == name:
            places, bits = np.arange(length), 16 // length
            sizes = entries[start : start + count, None] >> bits * places & (1 << bits) - 1
            packed: NDArray[Any] = (sizes << 4 * places).sum(axis=1).astype(f"<u{length // 2}")
            return packed
        start += count
    raise KeyError(name)


@functools.cache
def _signs(bit: int) -> NDArray[np.uint32]:
    """Return, for each byte, a number that has `bit` in its next four bits where the byte has a one."""
    places = np.arange(8)
    signs: NDArray[np.uint32] = ((np.arange(256)[:, None] >> places & 1) * bit << 4 * places).sum(axis=1).astype("<u4")
    return signs


@functools.cache
def _even_signs(bit: int) -> NDArray[np.uint32]:
    """Return the same for seven signs of eight, of which an even number is negative."""
    seven = np.arange(128)
    eighth = (seven[:, None] >> np.arange(7)).sum(axis=1) & 1
    signs: NDArray[np.uint32] = _signs(bit)[seven | eighth << 7]
    return signs


def _words(blocks: ByteArray, start: int, stop: int, kind: str) -> NDArray[Any]:
    return np.ascontiguousarray(blocks[:, start:stop]).view(kind)


def _odd(scales: NDArray[Any]) -> NDArray[np.int8]:
    odd: NDArray[np.int8] = (2 * scales + 1).astype(np.int8)
    return odd


def _halves_of(packed: ByteArray) -> ByteArray:
    """Return the low and the high half of each byte in turn."""
    return np.stack([packed & 15, packed >> 4], axis=2).reshape(len(packed), -1)


def _cut(packed: ByteArray, bits: int, mask: int) -> NDArray[np.uint16]:
    """Return the pieces of bytes, of some bits each, the lowest first."""
    pieces = packed[:, :, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8(mask)
    return pieces.reshape(len(packed), -1).astype(np.uint16)


def _four_sevens(words: NDArray[Any]) -> NDArray[Any]:
    """Return the signs in the lower 28 bits of words: seven bits for each eight weights."""
    sevens: NDArray[Any] = words[:, :, None] >> np.arange(0, 28, 7, dtype=np.uint32) & np.uint32(127)
    return sevens.reshape(len(words), -1)


def _coded(halves: ByteArray, scales: NDArray[np.int8], sizes: NDArray[Any], signs: NDArray[Any]) -> Coded:
    """Return codes from the entries of the grid of all weights, and the signs of each eight."""
    codes = sizes.view("<u4") | signs
    return Coded(np.ascontiguousarray(halves), scales, codes.view(np.uint8))


def _iq2_xxs(blocks: ByteArray) -> Coded:
    words = _words(blocks, 2, 66, "<u4").reshape(-1, 8, 2)
    places, others = (np.ascontiguousarray(words[:, :, which]) for which in (0, 1))
    sizes, signs = _grid("IQ2_XXS").take(places.view(np.uint8)), _even_signs(4).take(_four_sevens(others))
    return _coded(blocks[:, :2], np.repeat(_odd(others >> 28), 2, axis=1), sizes, signs)


def _iq2_xs(blocks: ByteArray) -> Coded:
    places = _words(blocks, 2, 66, "<u2")
    sizes, signs = _grid("IQ2_XS").take(places & 511), _even_signs(4).take(places >> 9)
    return _coded(blocks[:, :2], _odd(_halves_of(blocks[:, 66:74])), sizes, signs)


def _iq2_s(blocks: ByteArray) -> Coded:
    sizes = _grid("IQ2_S").take(blocks[:, 2:34] | _cut(blocks[:, 66:74], 2, 3) << 8)
    return _coded(blocks[:, :2], _odd(_halves_of(blocks[:, 74:82])), sizes, _signs(4).take(blocks[:, 34:66]))


def _iq3_xxs(blocks: ByteArray) -> Coded:
    words = _words(blocks, 66, 98, "<u4")
    sizes, signs = _grid("IQ3_XXS").take(blocks[:, 2:66]), _even_signs(8).take(_four_sevens(words))
    return _coded(blocks[:, :2], _odd(words >> 28), sizes, signs)


def _iq3_s(blocks: ByteArray) -> Coded:
    sizes = _grid("IQ3_S").take(blocks[:, 2:66] | _cut(blocks[:, 66:74], 1, 1) << 8)
    return _coded(blocks[:, :2], _odd(_halves_of(blocks[:, 106:110])), sizes, _signs(8).take(blocks[:, 74:106]))


def _iq1_s(blocks: ByteArray) -> Coded:
    words = _words(blocks, 34, 50, "<u2")
    high = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    moved_down = np.repeat((words >> 15) * np.uint16(255), 4, axis=1)
    scales = np.repeat(_odd(words >> 12 & 7), 2, axis=1)
    return _coded(blocks[:, :2], scales, _grid("IQ1").take(blocks[:, 2:34] | high << 8), _signs(4).take(moved_down))


def _iq1_m(blocks: ByteArray) -> Coded:
    words = _words(blocks, 48, 56, "<u2")  # in each of the four a part of the float16, and the scales of 64 weights
    half = (words >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16)
    nibbles = _halves_of(blocks[:, 32:48])
    sizes = _grid("IQ1").take(blocks[:, :32] | (nibbles & 7).astype(np.uint16) << 8)
    scales = (words[:, :, None] >> np.array([0, 3, 6, 9], np.uint16) & 7).reshape(len(blocks), -1)
    return _coded(half[:, None].view(np.uint8), _odd(scales), sizes, _signs(4).take((nibbles >> 3) * np.uint8(255)))


def _tq1_0(blocks: ByteArray) -> Coded:
    def digits(start: int, stop: int, count: int) -> ByteArray:
        """Return the ternary digits of fractions of 256, the first digit of all bytes first."""
        powers = np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]
        fractions = (blocks[:, None, start:stop] * powers).reshape(len(blocks), -1)
        return (fractions.astype(np.uint16) * np.uint16(3) >> 8).astype(np.uint8)

    return _ternary(blocks[:, 52:], np.concatenate([digits(0, 32, 5), digits(32, 48, 5), digits(48, 52, 4)], axis=1))


def _tq2_0(blocks: ByteArray) -> Coded:
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    digits = blocks[:, :64].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    return _ternary(blocks[:, 64:], digits.reshape(-1, SIZE))


def _ternary(halves: ByteArray, digits: ByteArray) -> Coded:
    """Return codes of numbers, each one less than its digit. The scale is -1, so that a digit of 3 has a code too."""
    scales, codes = np.full((len(halves), 16), -1, np.int8), np.uint8(3) - digits
    return Coded(np.ascontiguousarray(halves), scales, codes[:, 0::2] | codes[:, 1::2] << np.uint8(4))


GRID_TYPES: Final = MappingProxyType(
    {
        "IQ2_XXS": GridType(66, "IQ2", _iq2_xxs),
        "IQ2_XS": GridType(74, "IQ2", _iq2_xs),
        "IQ3_XXS": GridType(98, "IQ3_XXS", _iq3_xxs),
        "IQ1_S": GridType(50, "IQ1", _iq1_s),
        "IQ3_S": GridType(110, "IQ3_S", _iq3_s),
        "IQ2_S": GridType(82, "IQ2", _iq2_s),
        "IQ1_M": GridType(56, "IQ1", _iq1_m),
        "TQ1_0": GridType(54, "TERNARY", _tq1_0),
        "TQ2_0": GridType(66, "TERNARY", _tq2_0),
    }
)
"""By the name in files."""
