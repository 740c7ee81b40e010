"""Rows of numbers with a scale each, on any device: int8 as `quire.compute.weights.quantize` defines it, and fp8.

fp8 is e4m3 and goes the same way, with 448, its largest number, for 127: x is near q × scale, the scale is 1/448 of the
highest size in the row, and q = x × (448 / highest) is rounded to the nearest, ties to even. Rows all below 1e-30 count
as zero; where a number is not finite the scale is NaN, and so is all that is made of the row.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import torch

MOST: Final = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})
SMALLEST: Final = 1e-30


def quantized(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers as `dtype`, and the float32 scale of each row of the last dimension. Does not mutate."""
    exact, most = numbers.to(torch.float32), MOST[dtype]
    highest = exact.abs().amax(dim=-1, keepdim=True)
    usable = highest.isfinite() & (highest >= SMALLEST)
    # Of two tensors, because torch divides a number by a tensor in two roundings: as a product with 1 / tensor.
    factor = torch.where(usable, torch.full_like(highest, most) / highest, 0.0)
    scales = torch.where(usable, highest / most, torch.where(highest < SMALLEST, 0.0, torch.nan))
    products = torch.where(usable, exact, 0.0) * factor
    rounded = products.round() if dtype is torch.int8 else products
    return rounded.to(dtype), scales.squeeze(-1)


def restored(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what quantised rows stand for, float32."""
    return numbers.to(torch.float32) * scales[..., None]
