"""The seam between a decoder and the attention of its device.

    once             allocate_kv ─► KVPool ─► a KVPair for each layer
    once a step      StepInputs (numpy) ─► StepBatch (tensors) ─► plan ─► planned
    once a layer     write_kv(pair, slots, keys, values), then run(queries, pair, planned, rule)

A step's keys and values are written before it attends, so cached and new tokens are read the same way: from blocks. A
pool is one tensor of bytes, so that one operation copies or moves a block for any number of layers. A block of a place
holds one layer, or several with fewer numbers one after another (`KVCacheSpec.layers_per_place`). Each holds, in this
order:

    keys           [num_kv_heads, block_size, head_dim]          or head_dim / 2 bytes of two 4-bit numbers
    values         [num_kv_heads, block_size, head_dim]          the same
    key scales     [num_kv_heads, block_size]                    only for 8 and 4 bits; see `KVPair`
    value scales   [num_kv_heads, block_size]

The tokens of a head are adjacent (HND), so a head of a block is one contiguous piece.

Kernels take strides as data; only the last dimension must be contiguous. Layers of all KV groups share a place (see
`quire.compute.worker.cache_engine`); a pair names the group whose block tables its layer uses. Block tables hold -1 for
blocks that no query reads; a row with slot -1 writes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeVar

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.torch.attention.work import before, counted
from quire.compute.torch.int4 import INT4
from quire.core.config import MOST_DRAFTS
from quire.core.kv_spec import KV_FORMS, KVCacheSpec, KVHeads

if TYPE_CHECKING:
    from quire.compute.torch.adapters import AdaptedStep
    from quire.compute.torch.last_tokens import LastTokens

STORED_AS: Final = MappingProxyType(
    {
        "float32": (torch.float32, torch.float32),
        "bfloat16": (torch.bfloat16, torch.bfloat16),
        "float16": (torch.float16, torch.float16),
        "int8": (torch.int8, torch.int8),
        "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
        "k8v4": (torch.int8, INT4),
        "int4": (INT4, INT4),
    }
)
"""The dtypes of keys and of values in memory."""

MOST_SHORT: Final = 1 + MOST_DRAFTS
"""The most tokens of a short query: one known token, and draft tokens."""

Planned = TypeVar("Planned")


@dataclass(frozen=True, slots=True)
class KVPair:
    """The keys and values of a layer, as views of a pool, and the group whose block tables it uses.

    int8 and fp8 have a float32 scale for each token and head (`quire.compute.torch.quantize`). 4-bit numbers are two to
    a byte, with an int32 word (scale and minimum) for each group of numbers (`quire.compute.torch.int4`).
    """

    keys: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim, or half as many bytes]
    values: torch.Tensor  # the same
    key_scales: torch.Tensor | None = None  # [num_blocks, num_kv_heads, block_size], for 4 bits [..., num_groups]
    value_scales: torch.Tensor | None = None
    group: int = 0


@dataclass(frozen=True, slots=True)
class KVPool:
    """All blocks of one tier of memory."""

    content: torch.Tensor  # uint8 [num_places, num_blocks, bytes of a place of a block]
    spec: KVCacheSpec

    @classmethod
    def allocate(cls, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVPool:
        """Return new blocks with undefined content."""
        shape = (spec.num_places, num_blocks, place_bytes(spec))
        return cls(torch.empty(shape, dtype=torch.uint8, device=device), spec)

    def pair(self, rank: int, group: int) -> KVPair:
        """Return the part of the pool that belongs to a layer, by its place among those of its group."""
        own = self.spec.groups[group]
        heads, forms, stored = self.spec.heads_of(own), KV_FORMS[self.spec.dtype], STORED_AS[self.spec.dtype]
        place, part = divmod(rank, self.spec.layers_per_place(own))
        start, head_dim = part * sum(self.spec.layer_bytes(own)), heads.head_dim
        numbers, scales = [], []
        for dtype in stored:
            size = head_dim // 2 if dtype is INT4 else head_dim
            piece, start = self._piece((place, start), heads, dtype, (size,))
            numbers.append(piece)
        for form, dtype in zip(forms, stored, strict=True):
            if form.scaled:
                groups = (-(-head_dim // (form.group or head_dim)),) if dtype is INT4 else ()
                of_words = torch.int32 if dtype is INT4 else torch.float32
                piece, start = self._piece((place, start), heads, of_words, groups)
                scales.append(piece)
        (keys, values), (key_scales, value_scales) = numbers, scales or (None, None)
        return KVPair(keys, values, key_scales, value_scales, group)

    def _piece(
        self, where: tuple[int, int], heads: KVHeads, dtype: torch.dtype, of_a_token: tuple[int, ...]
    ) -> tuple[torch.Tensor, int]:
        """Return a view of numbers in each block, and the byte after them; `where`: a place, and the first byte."""
        (place, start), shape = where, (heads.num_kv_heads, self.spec.block_size, *of_a_token)
        end = start + math.prod(shape) * dtype.itemsize
        return self.content[place, :, start:end].view(dtype).unflatten(1, shape), end


def place_bytes(spec: KVCacheSpec) -> int:
    """Return the bytes of a place of a block."""
    return spec.key_block_bytes + spec.value_block_bytes


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """Which positions a layer's attention sees, and how scores become weights.

    A query at position p sees the positions from p - window + 1 to p, or all up to p; tokens of an image can see later
    ones (`StepShape.lasts`). `chunked`: chunks of as many positions as a window follow each other, and a query sees
    those of its own chunk up to p. With a soft cap c a score s,
    already scaled, becomes c × tanh(s / c). `sinks`, float32 `[num_heads]`: a score for each query head, which takes
    part in the softmax as a position without a value.
    """

    scale: float
    window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    chunked: bool = False


@dataclass(frozen=True, slots=True)
class StepShape:
    """The facts about a step that determine its launches, on the host, so that nothing is read from the device.

    The first `num_decodes` sequences compute one token each; `num_short` of all compute at most `MOST_SHORT`.
    `longest_query` is a bound: a step captured as a graph has the largest value of its replays.
    """

    num_decodes: int
    num_short: int
    longest_query: int
    query_starts: IntArray  # [num_sequences + 1]
    lengths: IntArray  # [num_sequences]
    block_tables: tuple[IntArray, ...]  # per KV group: [num_sequences, max_blocks]
    ends_seen: IntArray | None = None  # [num_tokens], as in `StepInputs`; None: all are 0
    ahead_in_windows: bool = False  # they are for layers with a window only

    @property
    def num_sequences(self) -> int:
        """The number of sequences that compute tokens."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """The number of computed tokens."""
        return int(self.query_starts[-1])

    def lasts(self, window: int | None) -> IntArray | None:
        """Return the last position that each token sees in layers with this window; None: its own.

        A window limits how far back a token sees.

        >>> one = np.array([0, 5]), np.array([8])
        >>> StepShape(0, 0, 5, *one, (), ends_seen=np.array([0, 7, 7, 7, 0])).lasts(None).tolist()
        [3, 6, 6, 6, 7]
        """
        if self.ends_seen is None:
            return None
        counts = np.diff(self.query_starts)
        positions = counted(counts) + np.repeat(self.lengths - counts, counts)
        return positions if self.ahead_in_windows and window is None else np.maximum(positions, self.ends_seen - 1)

    def table_starts(self, block_size: int) -> IntArray:
        """Return where the table of each sequence begins in `needed_tables`."""
        return before(-(-self.lengths // block_size))

    def needed_tables(self, block_size: int) -> list[IntArray]:
        """Return the block tables of each KV group, one after another, each with the blocks of its length only.

        In one padded table, a single long context would widen the rows of all sequences.
        """
        counts = (-(-self.lengths // block_size)).tolist()
        return [
            np.concatenate([row[:count] for row, count in zip(table, counts, strict=True)])
            for table in self.block_tables
        ]


class GivenRows(NamedTuple):
    """The rows of images in a step."""

    tokens: torch.Tensor  # int32 [num_given], the tokens that have one
    numbers: torch.Tensor  # float32 [num_given, embedding_size + deep rows]


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
    block_tables: tuple[torch.Tensor, ...]  # per KV group: those of all sequences (`StepShape.needed_tables`)
    logit_indices: torch.Tensor  # [num_logits], each an index of a token
    shape: StepShape
    state_indices: torch.Tensor | None = None  # [num_states], likewise; None: no hidden state is requested
    adapted: AdaptedStep | None = None  # the adapter of each row; None: no row has one
    given: GivenRows | None = None  # rows in place of embedded tokens; None: no token has one
    coordinates: tuple[torch.Tensor, ...] | None = None  # of each axis, [num_tokens]; None: each is the position
    last_tokens: LastTokens | None = None  # the tokens that negative ids mean; None: no id is negative
    halves: tuple[torch.Tensor, torch.Tensor] | None = None  # embedded tokens and hidden states, for a layer that joins


class StandingPlan(Protocol):
    """Fixed places in memory for the plans of steps of up to a number of tokens: recorded work reads them there.

    A larger place fits more steps, but launches more programs without work.
    """

    @property
    def planned(self) -> Sequence[object]:
        """The plans for `AttentionBackend.run`, the smallest place first; always the same objects."""
        ...

    def plan(self, shape: StepShape) -> int | None:
        """Copy the work and the block tables of a step into the smallest place that fits them, and return its index.

        None if none fits. Does not wait.
        """
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
        """Return places for plans of steps of up to as many tokens as the batch, with its positions and tables.

        Queries will have `dtype`. None if plans contain more than arrays that can be refilled. Does not mutate.
        """
        ...

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, quantised if the pair is. Mutates."""
        ...

    def run(self, queries: torch.Tensor, pair: KVPair, planned: Planned, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`, in the dtype of the queries."""
        ...
