"""Joins the parts of a softmax, in the same order in every program.

Attention is cut into splits of a fixed number of positions. A split has three results for a row: the highest score, the
sum of weights relative to it, and the weighted sum of values. `fold` adds them to those of all earlier splits:

    (highest, total, sums)  ◄─ fold ─  split 0  ◄─ fold ─  split 1  ◄─ fold ─  split 2 …      output = sums / total

A program that computes all splits of a row folds each at once. If splits were computed in parallel, their parts are in
memory and `merge_kernel` folds them, in the same order and with the same operations: a product and a sum that the
compiler could contract in one program and not in another are written as `fma`. So the number of programs that share a
row's work changes no bit, and each step can choose it. (Merging as a tree, or by the highest of all parts, would be
faster for hundreds of splits, but in another order.)
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant

LOG2_E: Final = tl.constexpr(math.log2(math.e))
AT_A_TIME: Final = 16
"""Parts to load at a time."""
MOST_OF_LAUNCH: Final = 65_520
"""Tasks or merges: a launch can have 65,535 in that dimension, and the next one begins at an aligned address."""
MERGE_COLUMNS: Final = tl.constexpr(3)
"""The columns of a merge list: token, first part, number of parts."""


class Results(NamedTuple):
    """Memory for the results of attention: outputs, and the parts of rows that are computed in parts."""

    outputs: torch.Tensor  # [num_tokens, num_heads, head_dim]
    part_sums: torch.Tensor  # float32 [num_parts, num_heads, head_dim]
    part_norms: torch.Tensor  # float32 [num_parts, num_heads, 2]: highest score, sum of weights
    token_stride: int
    head_stride: int
    num_heads: int

    @classmethod
    def of(cls, outputs: torch.Tensor, num_parts: int) -> Results:
        """Return outputs with room for parts. Does not mutate."""
        _, num_heads, head_dim = outputs.shape
        sums = torch.empty((max(num_parts, 1), num_heads, head_dim), dtype=torch.float32, device=outputs.device)
        norms = torch.empty((max(num_parts, 1), num_heads, 2), dtype=torch.float32, device=outputs.device)
        return cls(outputs, sums, norms, outputs.stride(0), outputs.stride(1), num_heads)


@triton.jit
def fold(whole, part, exponent_scale):
    """Return (highest, total, sums) of rows with one more split: `[rows]`, `[rows]`, `[rows, dims]`.

    Scores are not multiplied by `exponent_scale` yet. Either may be empty: highest -inf, the rest zero.
    """
    highest = tl.maximum(whole[0], part[0])
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    keep = tl.exp2((whole[0] - finite) * exponent_scale)
    add = tl.exp2((part[0] - finite) * exponent_scale)
    total = tl.fma(whole[1], keep, part[1] * add)
    sums = tl.fma(whole[2], keep[:, None], part[2] * add[:, None])
    return highest, total, sums


@triton.jit
def with_sink(highest, total, sinks, exponent_scale):
    """Return the totals of rows with the weight of a sink each: once for a row, after all its splits."""
    # fma, so that it is contracted in every program or in none.
    return total + tl.exp2(tl.fma(highest, -exponent_scale, sinks * LOG2_E))


@triton.jit
def merge_kernel(
    merges,
    results: Results,
    sinks,
    exponent_scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Fold the parts of one token's head, and write its output."""
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * MERGE_COLUMNS
    token, first, num_parts = tl.load(merge), tl.load(merge + 1), tl.load(merge + 2)
    if num_parts == 0:
        return
    dims = tl.arange(0, PADDED_DIM)[None, :]
    real = dims < HEAD_DIM
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sums = tl.zeros([1, PADDED_DIM], tl.float32)
    one = tl.arange(0, 1)
    for start in range(0, num_parts, UNROLL):
        for ahead in tl.static_range(UNROLL):
            there = start + ahead < num_parts
            row = (first + start + ahead).to(tl.int64) * results.num_heads + head
            part_highest = tl.load(results.part_norms + row * 2 + one, mask=there, other=float("-inf"))
            part_total = tl.load(results.part_norms + row * 2 + 1 + one, mask=there, other=0.0)
            part_sums = tl.load(results.part_sums + row * HEAD_DIM + dims, mask=real & there, other=0.0)
            highest, total, sums = fold((highest, total, sums), (part_highest, part_total, part_sums), exponent_scale)
    if sinks is not None:
        total = with_sink(highest, total, tl.load(sinks + head + one), exponent_scale)
    place = token * results.token_stride + head * results.head_stride + dims
    tl.store(results.outputs + place, (sums / total[:, None]).to(results.outputs.dtype.element_ty), mask=real)


def merge(
    merges: torch.Tensor, results: Results, sinks: torch.Tensor | None, exponent_scale: float, most_parts: int
) -> None:
    """Write the outputs of rows that were computed in parts, at most `most_parts` each. Mutates the outputs.

    `merges` is int32 `[num_merges, 3]`: a token, its first part and the number of its consecutive parts; an entry with
    no parts does nothing.
    """
    head_dim = results.outputs.shape[2]
    for piece in in_launches(merges):
        merge_kernel[results.num_heads, len(piece)](
            piece,
            results,
            sinks,
            exponent_scale,
            HEAD_DIM=head_dim,
            PADDED_DIM=triton.next_power_of_2(head_dim),
            UNROLL=min(AT_A_TIME, triton.next_power_of_2(most_parts)),
            num_warps=num_warps(head_dim),
        )


def num_warps(head_dim: int) -> int:
    """Return the number of warps of a merge: one holds 256 numbers of each part."""
    return max(1, int(triton.next_power_of_2(head_dim)) // 256)


def in_launches(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return rows of a work list in pieces that fit the second dimension of a launch. Does not mutate."""
    return rows.split(MOST_OF_LAUNCH) if len(rows) > MOST_OF_LAUNCH else (rows,)


def _variant(dtype: str, head_dim: int, unroll: int, *, sinks: bool) -> KernelVariant:
    arguments: dict[str, str | tuple[Any, ...]] = {"merges": "*i32:16", "exponent_scale": "fp32"}
    arguments["results"] = Results._make([f"*{dtype}:16", "*fp32:16", "*fp32:16", "i32:16", "i32:16", "i32"])
    constants = {"HEAD_DIM": head_dim, "PADDED_DIM": triton.next_power_of_2(head_dim), "UNROLL": unroll}
    return KernelVariant(
        f"{dtype} {head_dim}, {unroll} parts at a time{', sinks' * sinks}",
        merge_kernel,
        arguments=arguments | ({"sinks": "*fp32:16"} if sinks else {}),
        constants=constants | ({} if sinks else {"sinks": None}),
        num_warps=num_warps(head_dim),
        min_wide_share=0.0 if head_dim < 128 else 0.4,
    )


VARIANTS: Final = tuple(
    _variant(dtype, head_dim, unroll, sinks=sinks)
    for dtype, head_dim, unroll, sinks in (
        ("bf16", 64, 16, False),
        ("bf16", 64, 16, True),
        ("bf16", 80, 16, False),
        ("bf16", 128, 2, False),
        ("fp16", 128, 16, False),
        ("bf16", 256, 16, False),
        ("bf16", 512, 16, False),
    )
)
