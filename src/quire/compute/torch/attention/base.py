"""The seam between a decoder and the attention of its device.

    once             allocate_kv ─► KVPool ─► a KVPair for each layer
    once a step      StepInputs (numpy) ─► StepBatch (tensors) ─► plan ─► planned
    once a layer     write_kv(pair, slots, keys, values), then run(queries, pair, planned, rule)

A step's keys and values are written before it attends, so cached and new tokens are read the same way: from blocks. A
pool is one tensor, so that one operation copies or moves a block for any number of layers. The tokens of a head are
adjacent within a block (HND), so a head of a block is one contiguous piece:

    numbers   [2 × num_places, num_blocks, num_kv_heads, block_size, head_dim]   keys of place p at 2p, values at 2p + 1
    scales    [2 × num_places, num_blocks, num_kv_heads, block_size]             only for int8 and fp8

Kernels take strides as data; only the last dimension must be contiguous. One layer of each KV group shares a place (see
`quire.compute.worker.cache_engine`); a pair names the group whose block tables its layer uses. Block tables hold -1 for
blocks that no query reads; a row with slot -1 writes nothing.
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
    """The keys and values of a layer, as views of a pool, and the group whose block tables it uses."""

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
        """Return new blocks with undefined content."""
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
        """Return the part of the pool that belongs to a layer at a place. Does not mutate."""
        keys, values = self.numbers[2 * place], self.numbers[2 * place + 1]
        if self.scales is None:
            return KVPair(keys, values, group=group)
        return KVPair(keys, values, self.scales[2 * place], self.scales[2 * place + 1], group)


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Which positions a layer's attention sees, and how scores become weights.

    A query at position p sees the positions from p - window + 1 to p, or all up to p. With a soft cap c a score s,
    already scaled, becomes c × tanh(s / c).
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None


@dataclass(frozen=True, slots=True)
class StepShape:
    """The facts about a step that set the shape of its launches, kept on the host so that it need not ask the device.

    The first `num_decodes` sequences compute one token each. `longest_query` and `longest_context` are bounds: a step
    captured as a graph has the largest values of its replays.
    """

    num_decodes: int
    longest_query: int
    longest_context: int
    query_starts: IntArray  # [num_sequences + 1]
    lengths: IntArray  # [num_sequences]
    block_tables: tuple[IntArray, ...]  # per KV group: [num_sequences, max_blocks]

    @property
    def num_sequences(self) -> int:
        """The number of sequences that compute tokens."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """The number of computed tokens."""
        return int(self.query_starts[-1])


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens that one step computes, as int32 tensors on the device, and their shape on the host.

    Sequence s has the tokens query_starts[s] up to query_starts[s + 1], at the last positions of its `lengths[s]` known
    tokens, which include those of this step.
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
    """A fixed place for the plans of steps of up to a number of decodes: recorded work reads the plan from there."""

    @property
    def planned(self) -> object:
        """The plan for `AttentionBackend.run`; always the same object."""
        ...

    def plan(self, batch: StepBatch) -> bool:
        """Plan a step and return True; if it needs more room, return False and do nothing. Does not wait."""
        ...


class AttentionBackend(Protocol[Planned]):
    """An implementation of paged attention for one device."""

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, with undefined content. Does not mutate."""
        ...

    def plan(self, batch: StepBatch) -> Planned:
        """Return the plan that all layers of a step share: work lists, scratch. Does not wait. May reuse scratch."""
        ...

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> StandingPlan | None:
        """Return room for plans of steps of up to as many decodes, with the positions and tables of the batch.

        Queries will have `dtype`. None if a plan is more than arrays that can be refilled. Does not mutate.
        """
        ...

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, quantised if the pair is. Mutates."""
        ...

    def run(self, queries: torch.Tensor, pair: KVPair, planned: Planned, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`, in the dtype of the queries."""
        ...
