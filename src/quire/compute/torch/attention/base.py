"""The seam between a decoder and the attention of its device.

    once             allocate_kv ─► KVPool ─► a KVPair for each layer
    once a step      StepInputs (numpy) ─► StepBatch (tensors) ─► plan ─► planned
    once a layer     write_kv(pair, slots, keys, values), then run(queries, pair, planned, rule)

A step's keys and values are written before it attends, so cached tokens and new ones are read the same way: from
blocks. A pool is one tensor, so that a block is copied or moved in one operation whatever the number of layers, and
within a block each head's tokens lie together (HND), which makes a head of a block one contiguous piece:

    numbers   [2 × num_places, num_blocks, num_kv_heads, block_size, head_dim]   keys of place p at 2p, values at 2p + 1
    scales    [2 × num_places, num_blocks, num_kv_heads, block_size]             of int8 and fp8 only

Kernels take strides as data and must not rely on more than the last dimension being contiguous. A place is shared by
one layer of each KV group (see `quire.compute.worker.cache_engine`); a pair names the group whose block tables lead to
its layer's tokens. Block tables hold -1 for what no query reads; slot -1 stands for a row that writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

import torch

from quire.compute.arrays import IntArray
from quire.core.kv_spec import KVCacheSpec

STORED_AS: Final = MappingProxyType(
    {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "int8": torch.int8,
        "fp8": torch.float8_e4m3fn,
    }
)
SCALED: Final = frozenset({"int8", "fp8"})
"""Stored with a scale for each token and head; see `quire.compute.torch.quantize`."""

Planned = TypeVar("Planned")


@dataclass(frozen=True, slots=True)
class KVPair:
    """Where a layer keeps its keys and values, and the group whose block tables lead there. Views of a pool."""

    keys: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    key_scales: torch.Tensor | None = None  # float32 [num_blocks, num_kv_heads, block_size]
    value_scales: torch.Tensor | None = None  # float32 [num_blocks, num_kv_heads, block_size]
    group: int = 0


@dataclass(frozen=True, slots=True)
class KVPool:
    """All blocks of one tier of memory."""

    numbers: torch.Tensor  # [2 × num_places, num_blocks, num_kv_heads, block_size, head_dim]
    scales: torch.Tensor | None  # float32 [2 × num_places, num_blocks, num_kv_heads, block_size]

    @classmethod
    def allocate(cls, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVPool:
        """Return new blocks, their content undefined."""
        shape = (2 * spec.layers_per_group, num_blocks, spec.num_kv_heads, spec.block_size)
        dtype = STORED_AS[spec.dtype]
        numbers = torch.empty((*shape, spec.head_dim), dtype=dtype, device=device)
        if spec.dtype not in SCALED:
            return cls(numbers, None)
        return cls(numbers, torch.empty(shape, dtype=torch.float32, device=device))

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors of the pool; blocks are their second dimension."""
        return (self.numbers,) if self.scales is None else (self.numbers, self.scales)

    def pair(self, place: int, group: int) -> KVPair:
        """Return what a layer at a place sees of the pool. Does not mutate."""
        keys, values = self.numbers[2 * place], self.numbers[2 * place + 1]
        if self.scales is None:
            return KVPair(keys, values, group=group)
        return KVPair(keys, values, self.scales[2 * place], self.scales[2 * place + 1], group)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """What a layer's attention sees and how scores become weights.

    A query at position p sees the positions from p - window + 1 to p, or all up to p. With a soft cap c a score s,
    already scaled, becomes c × tanh(s / c).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class StepShape:
    """What the host knows of a step: all that a launch is shaped by, so that nobody waits for the device to ask it.

    The first `num_decodes` sequences compute one token each. `longest_query` and `longest_context` are bounds: a step
    that is captured as a graph states the largest that it will be replayed with.
    """

    num_decodes: int
    longest_query: int
    longest_context: int
    query_starts: IntArray  # [num_sequences + 1]
    lengths: IntArray  # [num_sequences]
    block_tables: tuple[IntArray, ...]  # per KV group: [num_sequences, max_blocks]

    @property
    def num_sequences(self) -> int:
        """How many sequences compute tokens."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed."""
        return int(self.query_starts[-1])


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens that one step computes, as int32 tensors on the device, and what the host knows of them.

    Sequence s has the tokens query_starts[s] up to query_starts[s + 1], at the last positions of its `lengths[s]`
    tokens: those known, the step's own among them.
    """

    token_ids: torch.Tensor  # [num_tokens]
    positions: torch.Tensor  # [num_tokens]
    query_starts: torch.Tensor  # [num_sequences + 1]
    lengths: torch.Tensor  # [num_sequences]
    slots: tuple[torch.Tensor, ...]  # per KV group: [num_tokens], block × block_size + offset
    block_tables: tuple[torch.Tensor, ...]  # per KV group: [num_sequences, max_blocks], contiguous
    logit_indices: torch.Tensor  # [num_logits], each an index of a token
    shape: StepShape


class StandingPlan(Protocol):
    """Where steps of up to this many decodes are planned, each in the place of the last: what was recorded reads it."""

    @property
    def planned(self) -> object:
        """What `AttentionBackend.run` takes; always the same."""
        ...

    def plan(self, batch: StepBatch) -> bool:
        """Plan a step and return True; False, and nothing is done, where it needs more room. Waits for nothing."""
        ...


class AttentionBackend(Protocol[Planned]):
    """A way to compute paged attention on one device."""

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, their content undefined. Does not mutate."""
        ...

    def plan(self, batch: StepBatch) -> Planned:
        """Return what all layers of a step share: work lists, scratch. Waits for nothing. May reuse its own scratch."""
        ...

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> StandingPlan | None:
        """Return room for plans of steps of up to as many decodes, over the positions and tables of the batch.

        Queries will be of `dtype`. None where a step is more than arrays that can be filled anew. Does not mutate.
        """
        ...

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, quantised where the pair is. Mutates."""
        ...

    def run(self, queries: torch.Tensor, pair: KVPair, planned: Planned, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`, in the dtype of the queries."""
        ...
