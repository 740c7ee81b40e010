"""Quantisation of rows with a scale each, in kernels: the same numbers as `quire.compute.torch.quantize`.

    largest absolute value ──► factor = most / highest ─► row × factor ─► rounded, ties to even ─► int8, or e4m3
                            └► scale = highest / most                      read again as q × scale

Divisions round to the nearest, and kernels that call these functions are compiled without fused multiply-add (`EXACT`),
so the bits are those of the definition. Numbers are rounded in float32 before the conversion, which is then exact and
does not depend on how a GPU, or the interpreter, converts.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import triton
import triton.language as tl

EXACT: Final[MappingProxyType[str, Any]] = MappingProxyType({"enable_fp_fusion": False})
"""Options of a launch that make every product and every sum round separately."""

SMALLEST: Final = tl.constexpr(1e-30)
INT8_MOST: Final = tl.constexpr(127.0)
FP8_MOST: Final = tl.constexpr(448.0)
TO_INTEGERS: Final = tl.constexpr(12582912.0)  # 1.5 × 2^23: adding it rounds to a multiple of 1
TO_SMALLEST_FP8: Final = tl.constexpr(24576.0)  # 1.5 × 2^14: … to a multiple of 2^-9, the step below 2^-6


@triton.jit
def size_of(numbers):
    """Return the absolute value of float32 numbers, and infinity for NaN, so that a maximum shows it."""
    sizes = tl.abs(numbers)
    return tl.where(sizes <= float("inf"), sizes, float("inf"))


@triton.jit
def scale_and_factor(highest, MOST: tl.constexpr):
    """Return the scale of a row with this largest absolute value, and the factor for its numbers.

    Both are 0 if all numbers are near 0; if one is not finite, the scale is NaN and the factor 0.
    """
    is_usable = (highest >= SMALLEST) & (highest < float("inf"))
    divisor = tl.where(is_usable, highest, 1.0)
    broken = tl.where(highest < SMALLEST, 0.0, float("nan"))
    scale = tl.where(is_usable, tl.div_rn(highest, MOST), broken)
    return scale, tl.where(is_usable, tl.div_rn(MOST, divisor), 0.0)


@triton.jit
def quantized(numbers, factor, IS_INT8: tl.constexpr):
    """Return float32 numbers times the factor of their row, as int8 or e4m3."""
    products = tl.where(factor > 0, numbers, 0.0) * factor
    if IS_INT8:
        return ((products + TO_INTEGERS) - TO_INTEGERS).to(tl.int8)
    else:
        bits = products.to(tl.int32, bitcast=True)
        even = (bits >> 20) & 1
        normal = ((bits + 0x7FFFF + even) & -0x100000).to(tl.float32, bitcast=True)  # to 3 bits after the first
        small = (products + TO_SMALLEST_FP8) - TO_SMALLEST_FP8
        return tl.where(tl.abs(products) < 0.015625, small, normal).to(tl.float8e4nv)
