"""Heads as 4-bit numbers, on any device: the numbers of `quire.compute.weights.int4`, two in a byte.

    head ─► turned by a Hadamard matrix ─► groups ─► n from 0 to 15, a scale and a minimum for each group
    bytes   of numbers 2i (low half) and 2i + 1 (high half)
    words   int32: the scale as bfloat16 in the low half, the minimum in the high half

The groups of a key have 32 numbers, and a value is one group. The bits are those of the definition.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from quire.compute.torch.quantize import SMALLEST
from quire.core.kv_spec import INT4_GROUP

INT4: Final = torch.uint8
"""The dtype of memory that holds 4-bit numbers; no other KV memory has it."""
MOST: Final = 15.0
_NAN: Final = 0x7FC0
_HIGH_HALF: Final = -0x10000


def turned(heads: torch.Tensor) -> torch.Tensor:
    """Return each row multiplied by a Hadamard matrix, float32; it is its own inverse. Does not mutate.

    The size of the matrix is the largest power of two that divides the row's; a longer row is multiplied in parts.

    >>> turned(torch.tensor([3.0, 1.0, 0.0, 0.0])).tolist()
    [2.0, 1.0, 2.0, 1.0]
    """
    numbers, count = heads.to(torch.float32), heads.shape[-1]
    size, half = count & -count, 1
    while half < size:
        low, high = numbers.unflatten(-1, (-1, 2, half)).unbind(-2)
        numbers = torch.stack((low + high, low - high), dim=-2).flatten(-3)
        half *= 2
    return numbers * turning_factor(count)


def turning_factor(count: int) -> float:
    """Return one over the root of the size of the matrix for rows of `count` numbers, as a float32.

    >>> turning_factor(80)
    0.25
    """
    return float(np.float32(1) / np.sqrt(np.float32(count & -count)))


def packed(heads: torch.Tensor, num_groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes of heads, `[..., head_dim / 2]`, and the words of their groups. Does not mutate."""
    exact, size = turned(heads), _group_size(heads.shape[-1], num_groups)
    groups = [_rounded(group) for group in exact.split(size, dim=-1)]
    low, high = torch.cat([n for n, _ in groups], dim=-1).unflatten(-1, (-1, 2)).unbind(-1)
    return low | high << 4, torch.stack([word for _, word in groups], dim=-1)


def unpacked(packed_rows: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return the heads of bytes and words, float32, turned back. Does not mutate."""
    n = torch.stack((packed_rows & 15, packed_rows >> 4), dim=-1).flatten(-2).to(torch.float32)
    size = _group_size(n.shape[-1], words.shape[-1])
    scales, minimums = (
        half.view(torch.float32).repeat_interleave(size, dim=-1)[..., : n.shape[-1]]
        for half in (words << 16, words & _HIGH_HALF)
    )
    return turned(n * scales + minimums)


def _group_size(head_dim: int, num_groups: int) -> int:
    return head_dim if num_groups == 1 else INT4_GROUP


def _rounded(group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n for each number of a group, uint8, and the word of the group."""
    finite = group.isfinite().all(dim=-1)
    numbers = torch.where(finite[..., None], group, 0.0)
    minimums = _as_bfloat16(numbers.amin(dim=-1))
    steps = (numbers.amax(dim=-1) - minimums) / torch.full_like(minimums, MOST)
    scales = torch.where(steps < SMALLEST, 0.0, _as_bfloat16(steps))
    finite &= scales.isfinite() & minimums.isfinite()
    factors = torch.where(finite & (scales > 0), torch.ones_like(scales) / scales, 0.0)
    n = ((numbers - minimums[..., None]) * factors[..., None]).clamp(0, MOST).round()
    low = torch.where(finite, (scales.view(torch.int32) >> 16) & 0xFFFF, _NAN)
    return n.nan_to_num(0).to(torch.uint8), low | minimums.view(torch.int32) & _HIGH_HALF


def _as_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.bfloat16).to(torch.float32)
