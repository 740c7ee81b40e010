"""PlainAttention: paged attention in readable torch operations, on any device; the oracle for the Triton kernels.

Queries are processed in tiles of 16 absolute positions, keys and values in tiles of 64, in order. Each query and head
keeps the running maximum, the sum of weights and the weighted sum of values. Tiles are always full, padded with zeros:

    positions    0 … 63 │ 64 … 127 │ 128 … 191         queries 128 … 143 hold the step's queries 130 … 133,
                 tile 0 │ tile 1   │ tile 2 · · ·       each at its own place; only images see later positions
                    └──► max, sum, output ──► rescale and add ──► … ──► output / sum

So every product has one shape, and a query is always at the same place of its tile: its bits depend only on its own
position, not on the batch, the chunks, the blocks, or which tokens were cached. Memory that no query of the sequence
sees is not read: it can hold anything, even NaN. All sums are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.torch.attention.base import AttentionRule, KVPair, KVPool, StepBatch
from quire.compute.torch.int4 import INT4, packed, unpacked
from quire.compute.torch.quantize import quantized, restored
from quire.core.kv_spec import KVCacheSpec

QUERIES: Final = 16
TILE: Final = 64


class PlainAttention:
    """Torch operations over a `KVPool`; implements `AttentionBackend`. Immutable."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, with undefined content."""
        return KVPool.allocate(spec, num_blocks, self._device)

    def plan(self, batch: StepBatch) -> StepBatch:
        """Return the step itself, which needs no plan."""
        return batch

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> None:
        """Return None: the host loops over sequences, which cannot be recorded."""

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, except for slots of -1. Mutates."""
        tokens = (slots >= 0).nonzero().squeeze(-1)
        kept, block_size = slots[tokens].long(), pair.keys.shape[2]
        where = (kept // block_size, kept % block_size)
        _store(pair.keys, pair.key_scales, where, keys[tokens])
        _store(pair.values, pair.value_scales, where, values[tokens])

    def run(self, queries: torch.Tensor, pair: KVPair, planned: StepBatch, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`, in their dtype. Does not mutate."""
        output, shape = torch.empty_like(queries), planned.shape
        tables = planned.block_tables[pair.group].tensor_split(shape.table_starts(pair.keys.shape[2])[1:].tolist())
        lasts = shape.lasts(rule.window)
        for sequence in range(shape.num_sequences):
            tokens = slice(int(shape.query_starts[sequence]), int(shape.query_starts[sequence + 1]))
            first = int(shape.lengths[sequence]) - (tokens.stop - tokens.start)
            kv = _Sequence(pair, tables[sequence])
            seen = np.arange(first, first + tokens.stop - tokens.start) if lasts is None else lasts[tokens]
            output[tokens] = _attend(queries[tokens], seen, first, kv, rule)
        return output


def _store(
    numbers: torch.Tensor,
    scales: torch.Tensor | None,
    where: tuple[torch.Tensor, torch.Tensor],
    rows: torch.Tensor,
) -> None:
    """Write rows to the blocks and offsets of their tokens. Mutates."""
    blocks, offsets = where
    if scales is not None:
        rows, row_scales = packed(rows, scales.shape[-1]) if numbers.dtype is INT4 else quantized(rows, numbers.dtype)
        scales[blocks, :, offsets] = row_scales
    if numbers.dtype is torch.float8_e4m3fn:  # torch cannot index fp8 on every device
        numbers, rows = numbers.view(torch.uint8), rows.view(torch.uint8)
    numbers[blocks, :, offsets] = rows.to(numbers.dtype)


def _attend(queries: torch.Tensor, lasts: IntArray, first: int, kv: _Sequence, rule: AttentionRule) -> torch.Tensor:
    """Attend with the queries of one sequence, whose positions begin at `first`; `lasts`: the last that each sees."""
    output, stop = torch.empty_like(queries), first + len(queries)
    for start in range(first // QUERIES * QUERIES, stop, QUERIES):
        low, high = max(start, first), min(start + QUERIES, stop)
        tile = queries.new_zeros((QUERIES, *queries.shape[1:]), dtype=torch.float32)
        tile[low - start : high - start] = queries[low - first : high - first]
        seen = np.zeros(QUERIES, np.int64)
        seen[low - start : high - start] = lasts[low - first : high - first]
        attended = _attend_tile(tile, seen, range(low, high), kv, rule)
        output[low - first : high - first] = attended[low - start : high - start].to(queries.dtype)
    return output


def _attend_tile(tile: torch.Tensor, lasts: IntArray, used: range, kv: _Sequence, rule: AttentionRule) -> torch.Tensor:
    """Attend with a tile of queries, `[QUERIES, num_heads, head_dim]`, each of which sees up to its number of `lasts`.

    Only those at the positions `used` count.
    """
    num_kv_heads, head_dim, start = kv.pair.keys.shape[1], tile.shape[-1], used.start // QUERIES * QUERIES
    # Query head h reads key-value head h // group: [num_kv_heads, QUERIES × group, head_dim]
    rows = tile.unflatten(1, (num_kv_heads, -1)).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    group = rows.shape[1] // QUERIES
    positions = torch.arange(start, start + QUERIES, device=tile.device).repeat_interleave(group)
    seen_up_to = torch.from_numpy(lasts).to(tile.device).repeat_interleave(group)[:, None]
    state, stop = _Softmax(rows), int(lasts.max()) + 1
    oldest = 0 if rule.window is None else max(0, used.start - rule.window + 1)
    for place in range(oldest // TILE * TILE, stop, TILE):
        keys, values = kv.gather(place, max(place, oldest), min(place + TILE, stop))
        scores = torch.matmul(rows, keys.transpose(1, 2)) * rule.scale  # [num_kv_heads, QUERIES × group, TILE]
        if rule.soft_cap is not None:
            scores = torch.tanh(scores / rule.soft_cap) * rule.soft_cap
        places = torch.arange(place, place + TILE, device=tile.device)
        seen = places <= seen_up_to
        if rule.window is not None:
            # The last position of a chunk sees its first one, as the last of a window does.
            ends = positions - positions % rule.window + (rule.window - 1) if rule.chunked else positions
            seen &= ends[:, None] - places < rule.window
        state.add(torch.where(seen, scores, -math.inf), values)
    if rule.sinks is not None:
        state.add_sinks(rule.sinks.view(num_kv_heads, group).repeat(1, QUERIES)[..., None])
    output = state.output / state.total
    return output.unflatten(1, (QUERIES, group)).transpose(0, 1).flatten(1, 2)


class _Softmax:
    """Running maximum, sum of weights and weighted sum of values, per row."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.output = torch.zeros_like(rows)
        self.total = rows.new_zeros((*rows.shape[:-1], 1))
        self._highest = torch.full_like(self.total, -math.inf)

    def add(self, scores: torch.Tensor, values: torch.Tensor) -> None:
        """Add a tile's scores, `[…, rows, TILE]`, and its values, `[…, TILE, head_dim]`. Mutates."""
        highest = torch.maximum(self._highest, scores.amax(dim=-1, keepdim=True))
        # A row that has seen no token yet gets weights of 0, not NaN.
        level = torch.where(highest == -math.inf, 0.0, highest)
        rescale, weights = torch.exp(self._highest - level), torch.exp(scores - level)
        self.total = self.total * rescale + weights.sum(dim=-1, keepdim=True)
        self.output = self.output * rescale + torch.matmul(weights, values)
        self._highest = highest

    def add_sinks(self, scores: torch.Tensor) -> None:
        """Add a score without a value to each row, `[…, rows, 1]`, after all tiles. Mutates."""
        self.total = self.total + torch.exp(scores - self._highest)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The keys and values of one sequence, read through its block table `[max_blocks]`."""

    pair: KVPair
    table: torch.Tensor

    def gather(self, place: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tile of keys and one of values from position `place` on, `[num_kv_heads, TILE, head_dim]`.

        Reads only the positions from `start` up to `stop`; the rest of the tiles is zero.
        """
        positions = torch.arange(start, stop, device=self.table.device)
        block_size = self.pair.keys.shape[2]
        where = (self.table[positions // block_size].long(), positions % block_size)
        filled = slice(start - place, stop - place)
        return (
            _tile(self.pair.keys, self.pair.key_scales, where, filled),
            _tile(self.pair.values, self.pair.value_scales, where, filled),
        )


def _tile(
    numbers: torch.Tensor, scales: torch.Tensor | None, where: tuple[torch.Tensor, torch.Tensor], filled: slice
) -> torch.Tensor:
    """Return a tile with the rows of some blocks and offsets at the places `filled`, and zeros elsewhere."""
    blocks, offsets = where
    if numbers.dtype is torch.float8_e4m3fn:
        rows = numbers.view(torch.uint8)[blocks, :, offsets].view(torch.float8_e4m3fn)
    else:
        rows = numbers[blocks, :, offsets]  # [tokens, num_kv_heads, head_dim]
    exact = as_floats(rows, None if scales is None else scales[blocks, :, offsets])
    tile = exact.new_zeros((numbers.shape[1], TILE, exact.shape[-1]))
    tile[:, filled] = exact.transpose(0, 1)
    return tile


def as_floats(rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the numbers of stored rows of any form, as float32. Does not mutate."""
    if scales is None:
        return rows.to(torch.float32)
    return unpacked(rows, scales) if rows.dtype is INT4 else restored(rows, scales)
