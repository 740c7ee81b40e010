"""Measures attention alone: one step over many layers of random keys and values.

The layers take turns and together exceed the caches, so each is read from memory, as in a step. On a GPU they are
captured as a graph, whose replays are timed: that measures the kernels, not their launches. Before that, the step is
computed twice into poisoned memory and compared, bit by bit and with a plain softmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.torch.attention import flashinfer
from quire.compute.torch.attention.base import (
    MOST_SHORT,
    AttentionBackend,
    AttentionRule,
    KVPair,
    StepBatch,
    StepShape,
)
from quire.compute.torch.attention.plain import as_floats
from quire.compute.torch.attention.triton import TritonAttention
from quire.compute.torch.attention.work import before
from quire.compute.torch.kernels.tile_shape import TileShape, Use
from quire.compute.torch.limits import captured, seconds_of
from quire.compute.torch.weights import DTYPES
from quire.core.errors import InvariantError
from quire.core.kv_spec import KVCacheSpec

MAX_ERROR: Final = 0.02
"""As a share of the output's length: bfloat16 weights and outputs cause less than a hundredth."""
MAX_LAYERS: Final = 64
MOST_CHECKED: Final = 64
"""The number of queries at the end of a sequence to compare."""


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """The queries and contexts of a step. The last `num_queries` tokens of each context are its queries.

    All contexts share the blocks of their first `shared_tokens` tokens. `contiguous`: blocks are in order, and no table
    is read; else they are placed at random.
    """

    contexts: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    block_size: int = 16
    num_queries: int = 1
    shared_tokens: int = 0
    contiguous: bool = False
    batch_invariant: bool = False
    backend: str = "triton"  # or "flashinfer"
    shape: TileShape | None = None  # of Triton's kernel; None: the one that an engine uses

    def spec(self, num_layers: int) -> KVCacheSpec:
        """Return the KV memory of this many layers of the step."""
        return KVCacheSpec.from_layers(
            [None] * num_layers,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.kv_dtype,
        )

    @property
    def num_tokens(self) -> int:
        """The number of queries."""
        return self.num_queries * len(self.contexts)

    @property
    def num_bytes(self) -> int:
        """Bytes of one layer: keys and values, counting shared ones once per context; queries, outputs."""
        rows = 2 * 2 * self.num_tokens * self.num_heads * self.head_dim
        return sum(self.contexts) * self.spec(1).bytes_per_layer_token + rows

    @property
    def num_operations(self) -> int:
        """Multiplications and additions of one layer."""
        first = self.num_queries * (self.num_queries - 1) // 2  # pairs that the earlier queries do not see
        seen = sum(self.num_queries * context - first for context in self.contexts)
        return 4 * seen * self.num_heads * self.head_dim


class AttentionRun:
    """Computes and times a step over as many layers as take `num_bytes`."""

    def __init__(self, step: AttentionStep, device: str, num_bytes: int) -> None:
        self.step = step
        self.num_layers = min(MAX_LAYERS, -(-num_bytes // step.num_bytes))
        self._device = torch.device(device)
        self._tables = block_tables(step)
        spec = step.spec(self.num_layers)
        self._attention = _attention(step, spec, self._device)
        self._pool = self._attention.allocate_kv(spec, int(self._tables.max()) + 1)
        self._pairs = [self._pool.pair(layer, 0) for layer in range(self.num_layers)]
        self._fill()
        shape = (step.num_tokens, step.num_heads, step.head_dim)
        self._queries = torch.randn(shape, device=self._device).to(DTYPES[step.dtype])
        self._rule = AttentionRule(step.head_dim**-0.5)
        self._planned = self._plan()
        self._pass: Callable[[], None] | None = None

    def check(self) -> None:
        """Raise `InvariantError` if two runs differ, or a sequence is far from a plain softmax."""
        first, second = (self._attend(self._pairs[0]).clone() for _ in range(2))
        if not torch.equal(first, second):
            raise InvariantError(f"attention differs between two runs of {self.step}")
        for sequence in {0, len(self.step.contexts) - 1}:
            end = (sequence + 1) * self.step.num_queries
            tokens = slice(end - min(MOST_CHECKED, self.step.num_queries), end)
            expected = self._plain(sequence, self._queries[tokens])
            error = float((first[tokens].float() - expected).norm() / expected.norm())
            if not error < MAX_ERROR:
                raise InvariantError(f"attention is off by {error:.3g} of its length in {self.step}")

    def seconds(self) -> float:
        """Return the seconds of one layer, the mean of a pass over all. The first call compiles and captures them."""
        if self._pass is None:
            self._pass = captured(self._all_layers, self._device)
        return seconds_of(self._pass, self._device) / self.num_layers

    def _fill(self) -> None:
        """Write numbers of a normal distribution to every slot. Mutates."""
        spec, num_blocks = self._pool.spec, self._pool.content.shape[1]
        slots = torch.arange(num_blocks * spec.block_size, device=self._device)
        shape = (len(slots), spec.num_kv_heads, spec.head_dim)
        for pair in self._pairs:
            self._attention.write_kv(pair, slots, *(torch.randn(shape, device=self._device) for _ in range(2)))

    def _all_layers(self) -> None:
        for pair in self._pairs:
            self._attention.run(self._queries, pair, self._planned, self._rule)

    def _attend(self, pair: KVPair) -> torch.Tensor:
        """Return one layer's outputs; unwritten places are NaN, because the memory freed last is reused."""
        poison = torch.full_like(self._queries, torch.nan)
        del poison
        outputs: torch.Tensor = self._attention.run(self._queries, pair, self._planned, self._rule)
        return outputs

    def _plan(self) -> Any:
        step = self.step
        lengths = np.array(step.contexts)
        starts = np.arange(len(lengths) + 1) * step.num_queries
        positions = (lengths[:, None] - step.num_queries + np.arange(step.num_queries)).ravel()
        shape = StepShape(
            num_decodes=len(lengths) if step.num_queries == 1 else 0,
            num_short=len(lengths) if step.num_queries <= MOST_SHORT else 0,
            longest_query=step.num_queries,
            query_starts=starts,
            lengths=lengths,
            block_tables=(self._tables,),
        )
        places, firsts, totals, table = (
            torch.from_numpy(array.astype(np.int32)).to(self._device)
            for array in (positions, starts, lengths, *shape.needed_tables(step.block_size))
        )
        batch = StepBatch(places, places, firsts, totals, (places,), (table,), totals, shape)
        planned = self._planned_as_served(batch)
        if not step.contiguous:
            return planned
        [launches] = planned.launches
        in_place = tuple(replace(each, shape=replace(each.shape, paged=False)) for each in launches)
        return replace(planned, launches=(in_place,))

    def _planned_as_served(self, batch: StepBatch) -> Any:
        """Return the plan of a step; for short queries, in the place that a recording uses, if the step fits."""
        if batch.shape.num_short:
            standing = self._attention.reserve(batch, self._queries.dtype)
            place = None if standing is None else standing.plan(batch.shape)
            if standing is not None and place is not None:
                return standing.planned[place]
        return self._attention.plan(batch)

    def _plain(self, sequence: int, queries: torch.Tensor) -> torch.Tensor:
        """Return the result of one softmax over the whole sequence, in float32."""
        length, pair = self.step.contexts[sequence], self._pairs[0]
        blocks = torch.from_numpy(self._tables[sequence, : -(-length // self.step.block_size)]).to(self._device)
        keys, values = (
            _gathered(numbers, scales, blocks)[:, :length].repeat_interleave(queries.shape[1] // numbers.shape[1], 0)
            for numbers, scales in ((pair.keys, pair.key_scales), (pair.values, pair.value_scales))
        )
        scores = torch.einsum("qhd,hkd->hqk", queries.float(), keys) * self._rule.scale
        places = torch.arange(length, device=self._device)
        scores.masked_fill_(places > places[length - len(queries) :, None], -torch.inf)
        return torch.einsum("hqk,hkd->qhd", torch.softmax(scores, -1), values)


def used_shape(step: AttentionStep, use: Use, device: str) -> TileShape:
    """Return the shape that an engine uses for a step."""
    return TritonAttention(step.spec(1), torch.device(device), num_heads=step.num_heads).shapes[0][use]


def _attention(step: AttentionStep, spec: KVCacheSpec, device: torch.device) -> AttentionBackend[Any]:
    """Return the backend of the step; raises `ExecutionError` if that is FlashInfer and it is not installed."""
    if step.backend == "flashinfer":
        return flashinfer.FlashInferAttention(flashinfer.load_package(), spec, device, num_heads=step.num_heads)
    return TritonAttention(
        spec, device, num_heads=step.num_heads, batch_invariant=step.batch_invariant, shape=step.shape
    )


def _gathered(numbers: torch.Tensor, scales: torch.Tensor | None, blocks: torch.Tensor) -> torch.Tensor:
    """Return the keys or values in some blocks, float32 `[num_kv_heads, num_tokens, head_dim]`."""
    rows = [as_floats(numbers[block], None if scales is None else scales[block]) for block in blocks.tolist()]
    return torch.stack(rows).transpose(0, 1).flatten(1, 2)


def block_tables(step: AttentionStep) -> IntArray:
    """Return the block tables of the sequences, `[num_sequences, max_blocks]`."""
    counts = -(-np.array(step.contexts) // step.block_size)
    ids = np.arange(counts.sum() + counts.max())
    if not step.contiguous:
        np.random.default_rng(0).shuffle(ids)
    tables: IntArray = ids[before(counts)[:, None] + np.arange(counts.max())]
    shared = step.shared_tokens // step.block_size
    tables[:, :shared] = tables[0, :shared]
    return tables
