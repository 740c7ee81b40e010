"""Copies whole blocks, within a pool of KV memory or between two, with all places in one launch.

A pool may be page-locked memory of the host, which a GPU has at the same address.

    pool [arrays, num_blocks, …]     (from, to) pairs on the device: one program for a piece of a block of an array

The content of a block does not matter: it is copied as words. The pairs of a call must not overlap: no block is written
twice, or written and read (a plan promises that).
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant

PIECE: Final = 2048


@triton.jit
def copy_blocks_kernel(
    source,
    target,
    pairs,
    num_words,
    source_array_stride,
    source_block_stride,
    target_array_stride,
    target_block_stride,
    PIECE: tl.constexpr,
):
    """Copy a piece of a block of one array."""
    pair, array = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source_block = tl.load(pairs + 2 * pair).to(tl.int64)
    target_block = tl.load(pairs + 2 * pair + 1).to(tl.int64)
    places = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    inside = places < num_words
    words = tl.load(source + array * source_array_stride + source_block * source_block_stride + places, mask=inside)
    tl.store(target + array * target_array_stride + target_block * target_block_stride + places, words, mask=inside)


def copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor) -> None:
    """Copy blocks of `source` to blocks of `target`, `[arrays, num_blocks, …]`, each block contiguous. Mutates.

    `pairs` are `[num_pairs, 2]`, int32 on the device: from which block, to which. Both may be the same tensor.
    """
    read, written = _as_words(source), _as_words(target)
    num_arrays, _, num_words = read.shape
    if len(pairs):
        grid = (len(pairs), num_arrays, triton.cdiv(num_words, PIECE))
        strides = *read.stride()[:2], *written.stride()[:2]
        copy_blocks_kernel[grid](read, written, pairs, num_words, *strides, PIECE=PIECE, num_warps=4)


def _as_words(pool: torch.Tensor) -> torch.Tensor:
    """Return a view of a pool as 4-byte words, or as bytes if the size of blocks is not a multiple of 4."""
    flat = pool.flatten(2)
    word = torch.int32 if flat.shape[-1] * flat.element_size() % 4 == 0 else torch.int8
    return flat.view(word)


VARIANTS = tuple(
    KernelVariant(
        f"{word} words",
        copy_blocks_kernel,
        arguments={name: f"*{word}:16" for name in ("source", "target")}
        | {"pairs": "*i32:16", "num_words": "i32:16"}
        | {f"{name}_{part}_stride": "i64:16" for name in ("source", "target") for part in ("array", "block")},
        constants={"PIECE": PIECE},
        min_wide_share=share,
    )
    for word, share in (("i32", 0.75), ("i8", 0.0))
)
"""The forms that the compile gate compiles; see `variants`."""
