"""Converts blocks of a file to codes with scales on a device, without rounding: a `Matrix` with the same numbers.

Q4_0, Q4_1    4 bits, a scale for 32 inputs          the bytes of a block have the order of `Matrix` already
Q4_K          4 bits, nested scales and minimums     32 low halves, then 32 high ones, become 16 and 16
Q8_0, Q5_0    8 bits, a scale for 32 inputs
MXFP4         8 bits, which are twice an e2m1, and half a scale
Q6_K          8 bits, nested scales for 16 inputs
E4M3          8-bit floats, a float32 scale for 128 inputs; not a GGUF type, see `quire.compute.quantized.blocks`
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Final

import torch

from quire.compute.torch.products import HALF, InputScales
from quire.compute.weights.small_floats import TWICE_E2M1

Coded = tuple[torch.Tensor, InputScales]
ROWS_AT_ONCE: Final = 1 << 14
"""The most rows that are converted together, which takes several times their memory: an embedding has many more."""


def coded(kind: str, rows: torch.Tensor) -> Coded:
    """Return rows of blocks of a type, uint8 `[out, bytes]`, as codes and scales. Does not mutate."""
    size, convert = CONVERT[kind]
    pieces = [_flat(*convert(piece.unflatten(-1, (-1, size)))) for piece in rows.split(ROWS_AT_ONCE)]
    return torch.cat([codes for codes, _ in pieces]), InputScales.joined(inputs for _, inputs in pieces)


def _flat(codes: torch.Tensor, inputs: InputScales) -> Coded:
    """Return codes and scales as matrices, in memory of their own."""
    return codes.flatten(1).contiguous(), inputs.changed(lambda each: each.flatten(1).contiguous())


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Return the float16 at a place of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _q4_0(blocks: torch.Tensor) -> Coded:
    return blocks[..., 2:], InputScales(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> Coded:
    return blocks[..., 4:], InputScales(_half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> Coded:
    fifth = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8, device=blocks.device) & 1
    codes = _halves(blocks[..., 6:]) | fifth.flatten(-2) << 4
    return codes.to(torch.int8) - 16, InputScales(_half(blocks, 0))


def _q8_0(blocks: torch.Tensor) -> Coded:
    return blocks[..., 2:].contiguous().view(torch.int8), InputScales(_half(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> Coded:
    twice = torch.from_numpy(TWICE_E2M1).to(blocks.device)
    # Scales beyond float16 are of zeros alone.
    scales = torch.exp2((blocks[..., :1].float() - 128).clamp(max=15)).half()
    return twice[_halves(blocks[..., 1:]).long()], InputScales(scales)


def _e4m3(blocks: torch.Tensor) -> Coded:
    codes = blocks[..., 4:].contiguous().view(torch.float8_e4m3fn)
    return codes, InputScales(blocks[..., :4].contiguous().view(torch.float32))


def _q4_k(blocks: torch.Tensor) -> Coded:
    first, second, third = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), dim=-1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), dim=-1)
    groups = _halves(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 2, HALF))
    codes = (groups[..., 0, :] | groups[..., 1, :] << 4).flatten(-3)
    outer = _half(blocks, 0), -_half(blocks, 2)
    return codes, InputScales(scales.to(torch.int8), minimums.to(torch.int8), *outer)


def _q6_k(blocks: torch.Tensor) -> Coded:
    four = _halves(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (4, 32))
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)[:, None]
    two = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> shifts & 3
    codes = (four | two << 4).flatten(-3).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return codes, InputScales(scales, outer_scales=_half(blocks, 208))


def _halves(packed: torch.Tensor) -> torch.Tensor:
    """Return the low halves of the bytes of the last axis, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


CONVERT: Final = MappingProxyType[str, tuple[int, Callable[[torch.Tensor], Coded]]](
    {
        "Q4_0": (18, _q4_0),
        "Q4_1": (20, _q4_1),
        "Q4_K": (144, _q4_k),
        "Q5_0": (22, _q5_0),
        "Q6_K": (210, _q6_k),
        "Q8_0": (34, _q8_0),
        "MXFP4": (17, _mxfp4),
        "E4M3": (132, _e4m3),
    }
)
"""By type: the bytes of a block, and the function that converts blocks to codes."""
