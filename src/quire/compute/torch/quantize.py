"""Rows of numbers with a scale each, on any device: int8 as defined in `quire.compute.weights.quantize`, and fp8.

fp8 is e4m3 and works the same way, with its largest number, 448, in place of 127: x is near q × scale, the scale is
1/448 of the largest absolute value in the row, and q = x × (448 / largest) is rounded to the nearest, ties to even. If
all numbers of a row are below 1e-30 they count as zero. If one is not finite, the scale is NaN, and so is every result.
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
    # Divides two tensors, because torch computes number / tensor with two roundings, as number × (1 / tensor).
    factor = torch.where(usable, torch.full_like(highest, most) / highest, 0.0)
    scales = torch.where(usable, highest / most, torch.where(highest < SMALLEST, 0.0, torch.nan))
    products = torch.where(usable, exact, 0.0) * factor
    rounded = products.round() if dtype is torch.int8 else products
    return rounded.to(dtype), scales.squeeze(-1)


def restored(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers of quantised rows, float32."""
    return numbers.to(torch.float32) * scales[..., None]
