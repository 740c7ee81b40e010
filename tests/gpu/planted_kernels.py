"""Kernels with faults, so that the compile gate is seen to find them: none ships, none is ever run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant


@triton.jit
def attend_kernel(
    queries, keys, values, tables, outputs, length, TILE: tl.constexpr, DIM: tl.constexpr, CARRIED: tl.constexpr
):
    """Attend over blocks of 16 tokens without a softmax; the ids of blocks are read a tile ahead if CARRIED."""
    rows, tokens, dims = tl.arange(0, 16), tl.arange(0, TILE), tl.arange(0, DIM)
    query = tl.load(queries + rows[:, None] * DIM + dims[None, :])
    total = tl.zeros([16, DIM], tl.float32)
    ahead = tl.load(tables + tokens // 16)
    for start in range(0, length, TILE):
        if CARRIED:
            blocks = ahead
            ahead = tl.load(tables + (start + TILE + tokens) // 16)
        else:
            blocks = tl.load(tables + (start + tokens) // 16)
        places = (blocks.to(tl.int64) * 16 + tokens % 16)[:, None] * DIM + dims[None, :]
        scores = tl.dot(query, tl.trans(tl.load(keys + places)))
        value = tl.load(values + places)
        total += tl.dot(scores.to(value.dtype), value)
    tl.store(outputs + rows[:, None] * DIM + dims[None, :], total)


class Place(NamedTuple):
    """Where numbers are, and what they are multiplied by; None: by nothing."""

    numbers: Any
    stride: Any
    factor: Any


@triton.jit
def grouped_kernel(source: Place, target: Place, SIZE: tl.constexpr):
    """Copy numbers, multiplied where there is a factor; parameters come in groups."""
    offsets = tl.program_id(0) * source.stride + tl.arange(0, SIZE)
    numbers = tl.load(source.numbers + offsets)
    if source.factor is not None:
        numbers *= source.factor
    tl.store(target.numbers + offsets, numbers)


@triton.jit
def fused_kernel(numbers, SIZE: tl.constexpr):
    """Asks for one rounding, although its variant allows none."""
    places = numbers + tl.arange(0, SIZE)
    found = tl.load(places)
    tl.store(places, tl.fma(found, found, found))


@triton.jit
def refused_kernel(numbers, SIZE: tl.constexpr):
    """Does not compile."""
    tl.store(numbers + tl.arange(0, SIZE), tl.zeros([2 * SIZE], tl.float32))


ALIGNED = {
    "queries": "*bf16:16",
    "keys": "*bf16:16",
    "values": "*bf16:16",
    "tables": "*i32:16",
    "outputs": "*fp32:16",
    "length": "i32",
}


def planted(name: str, *, carried: bool = True, tile: int = 64, dim: int = 128, **fields: Any) -> KernelVariant:
    """A variant that asks for two buffers."""
    constants: Mapping[str, Any] = {"TILE": tile, "DIM": dim, "CARRIED": carried}
    return KernelVariant(
        name, attend_kernel, constants=constants, **({"arguments": ALIGNED, "num_buffers": 2} | fields)
    )


VARIANTS = (
    planted("sound"),
    planted("ids not carried", carried=False),
    planted("too large", tile=256, num_stages=6, num_warps=8, num_buffers=5, capabilities=(80,)),
    planted("spilled", tile=128, dim=512, num_warps=1, capabilities=(90,)),
    planted("narrow", arguments={name: kind.partition(":")[0] for name, kind in ALIGNED.items()}, capabilities=(90,)),
    KernelVariant(
        "grouped",
        grouped_kernel,
        {"source": Place("*fp16:16", "i32:16", "fp32"), "target": Place("*fp16:16", 16, None)},
        {"SIZE": 1024},
    ),
    KernelVariant(
        "fused", fused_kernel, {"numbers": "*fp32:16"}, {"SIZE": 64}, min_wide_share=0, fuses=False, capabilities=(90,)
    ),
    KernelVariant("refused", refused_kernel, {"numbers": "*fp32:16"}, {"SIZE": 64}, capabilities=(90,)),
)
