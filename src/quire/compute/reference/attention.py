"""Paged attention: a query reads its sequence's keys and values through a block table.

The softmax runs over **fixed tiles of 64 absolute positions**, in order, keeping per query and head
the running maximum, the sum of weights and the weighted sum of values:

    positions    0 … 63 │ 64 … 127 │ 128 … 191         query at position 130
                 tile 0 │ tile 1   │ tile 2 · · ·       tile 2: 128, 129, 130; the rest masked
                    └──► max, sum, output ──► rescale and add ──► … ──► output / sum

Sinks are added to the sum once, after the last tile. In a bidirectional model, a query also sees the positions after
its own, all of which are in its step.

A tile is gathered through the block table and is always 64 wide, for any block size. Positions that a query does not
see have weight zero, which adds nothing. So the order of a query's sums depends only on its position: not on other
sequences, chunks or blocks, or on cached content. All queries of a chunk go through a tile together, but each has its
own sums (see `operations`).

Only the sequence's written positions are read. Positions of a tile before the first query's window and after the last
token of the step stay zero, so memory may contain anything there, even NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import BoolArray, FloatArray, IntArray
from quire.compute.models.distances import buckets_of
from quire.compute.reference.operations import exponential, soft_cap
from quire.compute.worker.cache_engine import LayerCache
from quire.compute.worker.model_runner import StepInputs

TILE: Final = 64


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """The positions that a layer's attention sees, and the settings that turn scores into weights."""

    scale: float
    window: int | None
    soft_cap: float | None
    sinks: FloatArray | None = None
    """A score for each query head that counts as a position without a value, float32 `[num_heads]`."""

    bidirectional: bool = False
    """Whether queries see later positions, all of which are in their step, and a window is on both sides."""

    ahead: bool = True
    """Whether queries heed `StepInputs.ends_seen`."""

    distance_bias: FloatArray | None = None
    """The bias of scores for each bucket of distances and each query head, float32 `[NUM_BUCKETS, num_heads]`."""

    chunked: bool = False
    """Whether the window is a chunk: a query sees the earlier positions of its own chunk."""

    def oldest(self, position: int) -> int:
        """Return the first position that a query sees."""
        if self.window is None:
            return 0
        return position - position % self.window if self.chunked else max(0, position - self.window + 1)

    def end_of_seeing(self, place: int) -> float:
        """Return the position after the last query that sees a place."""
        if self.window is None:
            return math.inf
        return place - place % self.window + self.window if self.chunked else place + self.window

    def seen(self, positions: IntArray, tile: int, ends: IntArray) -> BoolArray:
        """Return whether each query sees each position of the tile: up to its own, and before its end in `ends`."""
        places = np.arange(tile, tile + TILE)
        distance = positions[:, None] - places
        seen: BoolArray = (distance >= 0) | (places < ends[:, None])
        if self.window is None:
            return seen
        distance = np.abs(distance) if self.bidirectional else distance
        near: BoolArray = distance <= positions[:, None] % self.window if self.chunked else distance < self.window
        return seen & near


def write_kv(cache: LayerCache, slots: IntArray, keys: FloatArray, values: FloatArray) -> None:
    """Store the step's keys and values, `[num_tokens, num_kv_heads, head_dim]`. Mutates.

    Values that are the beginning of their keys are views of the keys, and are written twice.
    """
    places = np.divmod(slots, cache.keys.shape[1])
    cache.keys[places] = keys
    cache.values[places] = values


def paged_attention(query: FloatArray, cache: LayerCache, inputs: StepInputs, rule: AttentionRule) -> FloatArray:
    """Return the attention of each query, `[num_tokens, num_heads, size of a value]`. Does not mutate."""
    num_kv_heads = cache.keys.shape[2]
    num_tokens, num_heads, head_dim = query.shape
    # [num_tokens, num_kv_heads, num_heads / num_kv_heads, head_dim]
    grouped = query.reshape(num_tokens, num_kv_heads, num_heads // num_kv_heads, head_dim)
    output = np.empty((*grouped.shape[:-1], cache.values.shape[-1]), np.float32)
    for sequence in range(len(inputs.entries)):
        tokens = inputs.tokens_of(sequence)
        table = inputs.block_tables[cache.group][sequence]
        first = int(inputs.positions[tokens.start])
        has_ends = rule.ahead and len(inputs.ends_seen)
        ends = inputs.ends_seen[tokens] if has_ends else np.zeros(tokens.stop - tokens.start, np.int64)
        if rule.bidirectional:
            ends = np.full(len(ends), first + len(ends))
        output[tokens] = _attend(grouped[tokens], first, ends, _Sequence(cache, table), rule)
    return output.reshape(num_tokens, num_heads, -1)


def _attend(query: FloatArray, first: int, ends: IntArray, kv: _Sequence, rule: AttentionRule) -> FloatArray:
    """Attend with the queries of one sequence, whose positions begin at `first`; `ends`: see `StepInputs.ends_seen`."""
    count = len(query)
    state = _Softmax((*query.shape[:-1], kv.cache.values.shape[-1]))
    start = rule.oldest(first)
    for tile in range(start // TILE * TILE, first + count, TILE):
        # Only the queries that see some of the tile: not those before it, and not those whose window is after it.
        window = rule.window if rule.bidirectional else None
        ahead = 0 if not ends.any() else count if window is None else window - 1
        low = max(0, tile - first - ahead)
        high = int(min(count, rule.end_of_seeing(tile + TILE - 1) - first))
        keys, values = kv.gather(tile, max(tile, start), min(tile + TILE, first + count))
        scores = np.einsum("qkgd,tkd->qkgt", query[low:high], keys) * np.float32(rule.scale)
        positions = np.arange(first + low, first + high)
        if rule.distance_bias is not None:
            distances = np.arange(tile, tile + TILE) - positions[:, None]
            biases = rule.distance_bias[buckets_of(distances)]  # [queries, TILE, num_heads]
            scores = scores + biases.transpose(0, 2, 1).reshape(scores.shape)
        scores = soft_cap(scores, rule.soft_cap)  # [queries, num_kv_heads, group, TILE]
        seen = rule.seen(positions, tile, ends[low:high])
        scores = np.where(seen[:, None, None, :], scores, np.float32(-np.inf))
        state.add(slice(low, high), scores, values)
    if rule.sinks is not None:
        state.add_sinks(rule.sinks.reshape(query.shape[1:3]))
    return state.output / state.total


class _Softmax:
    """Running maximum, sum of weights and weighted sum of values, per query and head."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.output = np.zeros(shape, np.float32)  # [queries, num_kv_heads, group, size of a value]
        self.total = np.zeros((*shape[:-1], 1), np.float32)
        self._highest = np.full((*shape[:-1], 1), -np.inf, np.float32)

    def add(self, rows: slice, scores: FloatArray, values: FloatArray) -> None:
        """Add a tile's scores `[queries, num_kv_heads, group, TILE]` and its values.

        The values are `[TILE, num_kv_heads, head_dim]`. Mutates the state of the queries `rows`.
        """
        highest = np.maximum(self._highest[rows], scores.max(axis=-1, keepdims=True))
        rescale = exponential(self._highest[rows] - highest)
        weights = exponential(scores - highest)
        self.total[rows] = self.total[rows] * rescale + weights.sum(axis=-1, keepdims=True)
        self.output[rows] = self.output[rows] * rescale + np.einsum("qkgt,tkd->qkgd", weights, values)
        self._highest[rows] = highest

    def add_sinks(self, sinks: FloatArray) -> None:
        """Add the scores of sinks, which have no value, `[num_kv_heads, group]`, after all tiles. Mutates."""
        self.total += exponential(sinks[..., None] - self._highest)


@dataclass(frozen=True, slots=True)
class _Sequence:
    """The keys and values of one sequence, read through its block table `[max_blocks]`."""

    cache: LayerCache
    table: IntArray

    def gather(self, tile: int, start: int, stop: int) -> tuple[FloatArray, FloatArray]:
        """Return a tile of keys and one of values, `[TILE, num_kv_heads, head_dim]`.

        Reads only the positions from `start` up to `stop`; the rest of the tiles is zero.
        """
        block_size = self.cache.keys.shape[1]
        positions = np.arange(start, stop)
        stored, places = (self.table[positions // block_size], positions % block_size), positions - tile
        keys = np.zeros((TILE, *self.cache.keys.shape[2:]), np.float32)
        values = np.zeros((TILE, *self.cache.values.shape[2:]), np.float32)
        keys[places] = self.cache.keys[stored]
        values[places] = self.cache.values[stored]
        return keys, values
