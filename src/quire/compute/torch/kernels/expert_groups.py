"""Routing of tokens to experts: choosing, sorting and restoring happen on the device, so that the host need not wait.

    scores ─► `route`     the best experts of a row, in the order of ids, and their shares     a program for each row
           ─► `group`     pairs (row, choice) by expert, cut into tiles                        a program for each expert
    outputs ─► `combine`  the sum of a row's pairs, weighted, in the order of expert ids       a program for each row

An unused row of a recorded step goes where the first row goes, so that no extra matrix is read for it. A pair is a
number, row × experts_per_token + choice. `group` sorts pairs by counting: the program of an expert counts the pairs of
all experts, so it knows where its own begin, and puts them there in order. Tiles have at most `tile_rows` pairs of one
expert:

    pairs   5 of expert 0 │ 4 of expert 2 │ 1 of expert 7         tile_rows 4: (0, 0, 4) (0, 4, 1) (2, 5, 4) (7, 9, 1)

n pairs of one expert take n // tile_rows tiles and perhaps one more. So there are at most num_pairs // tile_rows tiles,
and one more for each expert that can have pairs. The host knows this bound and launches that many; the remaining tiles
have no pairs.

Sums are of integers, or of one row: bits do not depend on which other rows picked an expert. Rejected: torch's
operations (17 for `route` and `combine` if a row has 8 experts, and `bincount`, which makes the host wait).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl

from quire.compute.torch.kernels.variants import KernelVariant

CHUNK: Final = 1024
"""Pairs to process at a time."""
BLOCK: Final = 1024
"""Numbers of a row that a program sums up."""
TILE_COLUMNS: Final = tl.constexpr(3)
"""The columns of a tile: expert, first place in the order of pairs, number of pairs."""


class Groups(NamedTuple):
    """Pairs by expert, and how they are cut into tiles."""

    order: torch.Tensor  # int32 [num_pairs]: pairs, those of the first expert first
    tiles: torch.Tensor  # int32 [num_tiles, TILE_COLUMNS]


@triton.jit
def route_kernel(
    scores, slots, ids, shares, num_experts, CHOICES: tl.constexpr, NORMALIZES: tl.constexpr, EXPERTS: tl.constexpr
):
    """Choose the experts of a row."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    there = experts < num_experts
    source = tl.where(tl.load(slots + row) < 0, 0, row)  # the first row, for unused rows
    found = tl.load(scores + source * num_experts + experts, mask=there, other=float("-inf"))
    powers = tl.exp(found - tl.max(found))
    weights = powers / tl.sum(powers)
    # NaN counts as 0, so that every row goes to existing experts, whatever its scores.
    rest = tl.where(there, tl.where(weights >= 0, weights, 0.0), -1.0)
    chosen = experts < 0
    for _ in tl.static_range(CHOICES):
        is_best = experts == tl.argmax(rest, axis=0, tie_break_left=True)
        chosen = chosen | is_best
        rest = tl.where(is_best, -1.0, rest)
    if NORMALIZES:
        weights = weights / tl.sum(tl.where(chosen, weights, 0.0))
    places = row * CHOICES + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(ids + places, experts, mask=chosen)
    tl.store(shares + places, weights, mask=chosen)


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def group_kernel(
    ids, order, tiles, num_pairs, num_tiles, ROWS: tl.constexpr, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    """Put the pairs of an expert in their places and write its tiles; the last program writes the remaining tiles."""
    expert = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    counts = tl.zeros([EXPERTS], tl.int32)
    for start in range(0, num_pairs, CHUNK):
        pairs = start + tl.arange(0, CHUNK)
        there = pairs < num_pairs
        counts += tl.histogram(tl.load(ids + pairs, mask=there, other=0), EXPERTS, mask=there)
    first = tl.sum(tl.where(experts < expert, counts, 0))
    count = tl.sum(tl.where(experts == expert, counts, 0))
    first_tile = tl.sum(tl.where(experts < expert, tl.cdiv(counts, ROWS), 0))
    is_last = expert == tl.num_programs(0) - 1  # it has no pairs
    end_tile = tl.where(is_last, num_tiles, first_tile + tl.cdiv(count, ROWS))
    for start in range(first_tile, end_tile, CHUNK):
        places = start + tl.arange(0, CHUNK)
        passed = (places - first_tile) * ROWS
        fields, inside = tiles + places * TILE_COLUMNS, places < end_tile
        tl.store(fields, tl.zeros_like(places) + expert, mask=inside)
        tl.store(fields + 1, first + passed, mask=inside)
        tl.store(fields + 2, tl.minimum(tl.maximum(count - passed, 0), ROWS), mask=inside)
    if count > 0:
        for start in range(0, num_pairs, CHUNK):
            pairs = start + tl.arange(0, CHUNK)
            belongs = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1) == expert
            places = first + tl.cumsum(belongs.to(tl.int32), 0) - 1
            tl.store(order + places, pairs, mask=belongs)
            first += tl.sum(belongs.to(tl.int32))


@triton.jit
def combine_kernel(outputs, shares, totals, size, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Add the outputs of a row's experts, each times its share, for a piece of the row."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = row * CHOICES + choice
        output = tl.load(outputs + pair * size + places, mask=inside, other=0.0).to(tl.float32)
        total += output * tl.load(shares + pair)
    tl.store(totals + row * size + places, total.to(totals.dtype.element_ty), mask=inside)


def route(
    scores: torch.Tensor, slots: torch.Tensor, experts_per_token: int, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each row, int32 in the order of ids, and their shares: `[num_rows, experts_per_token]`.

    `scores` are float32 `[num_rows, num_experts]`, contiguous. Chooses the experts with the highest softmax; among
    equal ones, those with the lowest ids. Normalising divides shares by their sum. A row whose slot is -1 goes where
    the first row goes. Does not mutate.
    """
    num_rows, num_experts = scores.shape
    shares = scores.new_empty((num_rows, experts_per_token))
    ids = torch.empty_like(shares, dtype=torch.int32)
    if num_rows:
        route_kernel[(num_rows,)](
            scores,
            slots,
            ids,
            shares,
            num_experts,
            CHOICES=experts_per_token,
            NORMALIZES=normalize,
            EXPERTS=triton.next_power_of_2(num_experts),
            num_warps=1,
        )
    return ids, shares


def group(ids: torch.Tensor, num_experts: int, tile_rows: int) -> Groups:
    """Return the pairs of rows and experts, int32 `[num_rows, experts_per_token]`, in tiles. Does not mutate."""
    num_pairs = ids.numel()
    num_tiles = num_pairs // tile_rows + min(num_pairs, num_experts)
    order = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty((num_tiles, TILE_COLUMNS.value), dtype=torch.int32, device=ids.device)
    if num_pairs:
        bins = max(32, triton.next_power_of_2(num_experts))
        group_kernel[(num_experts + 1,)](
            ids, order, tiles, num_pairs, num_tiles, ROWS=tile_rows, CHUNK=CHUNK, EXPERTS=bins, num_warps=4
        )
    return Groups(order, tiles)


def combine(outputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each row's pairs, `[num_rows, size]` of `[num_pairs, size]`. Does not mutate."""
    (num_rows, choices), size = shares.shape, outputs.shape[1]
    totals = outputs.new_empty((num_rows, size))
    if num_rows:
        grid = (num_rows, triton.cdiv(size, BLOCK))
        combine_kernel[grid](outputs, shares, totals, size, CHOICES=choices, BLOCK=BLOCK, num_warps=4)
    return totals


def _variants() -> list[KernelVariant]:
    shapes = (("Qwen3-30B-A3B", 128, 8, "bf16", 0.75), ("Mixtral", 8, 2, "fp16", 0.0))  # a row of 8 scores is narrow
    found = []
    for model, num_experts, choices, dtype, share in shapes:
        ids, shares = {"ids": "*i32:16"}, {"shares": "*fp32:16"}
        scores = {"scores": "*fp32:16", "slots": "*i32:16", "num_experts": "i32:16" if num_experts % 16 == 0 else "i32"}
        routing = {"CHOICES": choices, "NORMALIZES": True, "EXPERTS": num_experts}
        found.append(
            KernelVariant(f"route, {model}", route_kernel, scores | ids | shares, routing, 1, min_wide_share=share)
        )
        tables = {"order": "*i32:16", "tiles": "*i32:16", "num_pairs": "i32", "num_tiles": "i32"}
        grouping = {"ROWS": 16, "CHUNK": CHUNK, "EXPERTS": max(32, num_experts)}
        found.append(KernelVariant(f"group, {model}", group_kernel, ids | tables, grouping, min_wide_share=0.0))
        rows = {"outputs": f"*{dtype}:16", "totals": f"*{dtype}:16", "size": "i32:16"}
        summing = {"CHOICES": choices, "BLOCK": BLOCK}
        found.append(KernelVariant(f"combine, {model}", combine_kernel, rows | shares, summing, min_wide_share=0.7))
    return found


VARIANTS = tuple(_variants())
"""The forms that the compile gate compiles; see `variants`."""
