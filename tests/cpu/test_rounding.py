"""bfloat16 and int8: each number becomes the nearest one that there is, as exact arithmetic says."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quire.compute.weights import bfloat16
from quire.compute.weights.bfloat16 import narrowed, widened
from quire.compute.weights.quantize import SMALLEST, quantized, rounded_to_int8

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
BITS = st.integers(0, (1 << 32) - 1)


def number_of(bits: int) -> float:
    """The float32 of these bits, exactly."""
    found: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return found


def nearest(value: Fraction) -> int:
    """The nearest whole number, of two equally near ones the even one."""
    return round(value)


@given(st.lists(BITS, min_size=1, max_size=20))
def test_a_number_is_rounded_to_the_nearest_of_the_upper_halves(all_bits: list[int]) -> None:
    narrow = narrowed(np.array(all_bits, np.uint32).view(np.float32))
    for bits, found in zip(all_bits, narrow.tolist(), strict=True):
        if math.isnan(number_of(bits)):
            assert math.isnan(number_of(found << 16))
            continue
        sign, size = bits & 0x8000_0000, bits & 0x7FFF_FFFF  # sizes of one sign are in the order of their bits
        assert found << 16 & 0x8000_0000 == sign
        assert found & 0x7FFF == min(nearest(Fraction(size, 1 << 16)), 0x7F80)


@pytest.mark.parametrize(
    ("bits", "narrow"),
    [
        (0x3F80_7FFF, 0x3F80),
        (0x3F80_8000, 0x3F80),  # half way: to the even one
        (0x3F80_8001, 0x3F81),
        (0x3F81_8000, 0x3F82),
        (0x7F7F_7FFF, 0x7F7F),
        (0x7F7F_8000, 0x7F80),  # infinite
        (0xFF80_0000, 0xFF80),
        (0x8000_0000, 0x8000),
        (0x0000_8001, 0x0001),
        (0x7F80_0001, 0x7FC0),  # a NaN whose upper half alone would be infinite
        (0xFFFF_FFFF, 0xFFFF),
    ],
)
def test_the_edges_of_narrowing(bits: int, narrow: int) -> None:
    assert narrowed(np.array([bits], np.uint32).view(np.float32)).tolist() == [narrow]


@given(st.lists(st.integers(0, (1 << 16) - 1), max_size=20))
def test_widening_is_exact_and_narrowing_brings_it_back(halves: list[int]) -> None:
    wide = widened(np.array(halves, np.uint16))
    assert wide.view(np.uint32).tolist() == [half << 16 for half in halves]
    quiet = [half | 0x40 if half & 0x7F80 == 0x7F80 and half & 0x7F else half for half in halves]
    assert narrowed(wide).tolist() == quiet


def test_a_tensor_of_any_length_is_narrowed_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bfloat16, "CHUNK", 4)
    for length in (0, 1, 3, 4, 5, 8, 9):
        numbers = np.arange(length, dtype=np.float32)
        assert widened(narrowed(numbers)).tolist() == numbers.tolist()
    assert narrowed(np.array([1.5, -2.0], np.float16)).tolist() == [0x3FC0, 0xC000]


@given(st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=5))
@example([[0.0, 0.0, float(np.finfo(np.float32).max)]])
def test_int8_is_the_nearest_multiple_of_the_scale_of_its_row(rows: list[list[float]]) -> None:
    numbers = np.array(rows, np.float32)
    q, scales = quantized(numbers)
    assert (q.shape, q.dtype, scales.shape, scales.dtype) == (numbers.shape, np.int8, (len(rows),), np.float32)
    for row, found, scale in zip(numbers, q, scales, strict=True):
        highest = np.abs(row).max()
        if highest < SMALLEST:
            assert (found.tolist(), scale) == ([0, 0, 0], 0)
            continue
        assert scale == highest / np.float32(127)
        assert np.abs(found).max() == 127
        for number, whole in zip(row.tolist(), found.tolist(), strict=True):
            exact = Fraction(number) * 127 / Fraction(float(highest))
            assert abs(exact - whole) <= Fraction(1, 2) + Fraction(1, 1 << 14), "half a step, and what float32 rounds"
    with np.errstate(over="ignore"):
        assert np.array_equal(rounded_to_int8(numbers), q * scales[:, None])


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_breaks_its_row_and_no_other(broken: float) -> None:
    q, scales = quantized(np.array([[1.0, broken], [2.0, -1.0]], np.float32))
    assert q.tolist() == [[0, 0], [127, -64]]
    assert np.isnan(scales).tolist() == [True, False]
    assert np.isnan(rounded_to_int8(np.array([[1.0, broken]], np.float32))).all()


def test_the_smallest_number_that_counts_is_kept_and_what_is_below_is_zero() -> None:
    below = np.nextafter(SMALLEST, np.float32(0))
    q, scales = quantized(np.array([[SMALLEST, -SMALLEST], [below, -below]], np.float32))
    assert q.tolist() == [[127, -127], [0, 0]]
    assert scales.tolist() == [float(SMALLEST / np.float32(127)), 0.0]
