"""Steps of paged attention by themselves: random sequences in scattered blocks, and a float64 oracle."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from quire.compute.torch.attention.base import (
    MOST_SHORT,
    STORED_AS,
    AttentionBackend,
    AttentionRule,
    KVPair,
    KVPool,
    StepBatch,
    StepShape,
)
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.cache import NOT_A_NUMBER
from quire.compute.torch.quantize import quantized, restored
from quire.compute.weights.int4 import rounded_to_int4
from quire.core.kv_spec import KVCacheSpec

FORMS: dict[str, tuple[torch.dtype | int, torch.dtype | int]] = STORED_AS | {"k8v4": (torch.int8, 0), "int4": (32, 0)}


WIDEST = torch.float16 if torch.cuda.is_available() else torch.float32
"""What tests compute in: on a GPU, kernels of float32 spill their registers, and no engine uses them."""
WIDEST_NAME = str(WIDEST).removeprefix("torch.")


@dataclass(frozen=True)
class Model:
    """What attention knows of a model."""

    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = WIDEST
    kv_dtype: str = WIDEST_NAME
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def spec(self) -> KVCacheSpec:
        return KVCacheSpec.from_layers(
            [self.window],
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.kv_dtype,
        )

    @property
    def rule(self) -> AttentionRule:
        sinks = 3 * torch.randn(self.num_heads, generator=torch.Generator().manual_seed(5)) if self.sinks else None
        return AttentionRule(self.head_dim**-0.5, self.window, self.soft_cap, sinks)


@dataclass
class Step:
    """The sequences of a step: how many tokens are known of each, and how many of these are computed.

    Keys, values and queries of a sequence are drawn from its `seed`, so that it is the same in whatever step it stands.
    Whatever no query of a sequence sees is poison: other blocks, places beyond the last token, tables before a window.
    """

    model: Model
    sequences: Sequence[tuple[int, int]]
    seeds: Sequence[int] = ()
    shared_tokens: int = 0  # that all sequences begin with
    copied: bool = False  # they do not share the blocks of these
    order_seed: int = 0
    device: str = "cpu"
    keys: list[torch.Tensor] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    queries: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seeds = self.seeds or range(len(self.sequences))
        common = self._drawn(10_000, self.shared_tokens)
        for seed, (length, count) in zip(self.seeds, self.sequences, strict=True):
            keys, values = self._drawn(seed, length)
            keys[: self.shared_tokens], values[: self.shared_tokens] = common
            generator = torch.Generator().manual_seed(7 * seed + 1)
            # A query belongs to its position: drawn for all of them, those of the step taken.
            queries = torch.randn(length, self.model.num_heads, self.model.head_dim, generator=generator)
            self.keys.append(keys)
            self.values.append(values)
            self.queries.append(queries[length - count :].to(self.model.dtype))
        self._tables = self._block_tables()

    def _drawn(self, seed: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (length, self.model.num_kv_heads, self.model.head_dim)
        return tuple(torch.randn(shape, generator=generator).to(self.model.dtype) for _ in range(2))  # type: ignore[return-value]

    def _block_tables(self) -> np.ndarray:
        size = self.model.block_size
        shared = 0 if self.copied else self.shared_tokens // size
        counts = [-(-length // size) for length, _ in self.sequences]
        self.num_blocks = sum(counts) + 3
        free = iter(np.random.default_rng(self.order_seed).permutation(self.num_blocks).tolist())
        tables = np.full((len(counts), max(counts) + 1), -1, np.int64)
        common = [next(free) for _ in range(shared)]
        for sequence, count in enumerate(counts):
            tables[sequence, :count] = [*common, *(next(free) for _ in range(count - shared))]
            length, computed = self.sequences[sequence]
            first = self.model.spec.groups[0].first_needed(length - computed) // size
            tables[sequence, :first] = -1
        return tables

    def batch(self) -> StepBatch:
        """The step as a backend takes it."""
        counts = np.array([count for _, count in self.sequences])
        lengths = np.array([length for length, _ in self.sequences])
        starts = np.concatenate(([0], np.cumsum(counts)))
        positions = np.concatenate([np.arange(length - count, length) for length, count in self.sequences])
        num_decodes = next((i for i, count in enumerate(counts) if count != 1), len(counts))
        num_short = int((counts <= MOST_SHORT).sum())
        shape = StepShape(num_decodes, num_short, int(counts.max()), starts, lengths, (self._tables,))
        tensors = [
            torch.from_numpy(array.astype(np.int32)).to(self.device)
            for array in (positions, starts, lengths, *shape.needed_tables(self.model.block_size), starts[1:] - 1)
        ]
        moved_positions, moved_starts, moved_lengths, table, last = tensors
        return StepBatch(
            moved_positions, moved_positions, moved_starts, moved_lengths, (moved_positions,), (table,), last, shape
        )

    def pair(self) -> KVPair:
        """Keys and values of all sequences in their blocks, and poison everywhere else."""
        pool = KVPool.allocate(self.model.spec, self.num_blocks, torch.device(self.device))
        pool.content.fill_(NOT_A_NUMBER)
        pair = pool.pair(0, 0)
        size = self.model.block_size
        writer = PlainAttention(torch.device(self.device))
        for sequence, (length, computed) in enumerate(self.sequences):
            positions = np.arange(self.model.spec.groups[0].first_needed(length - computed), length)
            slots = self._tables[sequence, positions // size] * size + positions % size
            keys, values = (each[sequence][positions].to(self.device) for each in (self.keys, self.values))
            writer.write_kv(pair, torch.from_numpy(slots.astype(np.int32)).to(self.device), keys, values)
        return pair

    def run(self, backend: AttentionBackend, pair: KVPair | None = None) -> list[torch.Tensor]:
        """What a backend makes of it, for each sequence."""
        queries, rule = torch.cat(self.queries).to(self.device), self.model.rule
        rule = rule if rule.sinks is None else replace(rule, sinks=rule.sinks.to(self.device))
        output = backend.run(queries, pair or self.pair(), backend.plan(self.batch()), rule)
        return list(output.cpu().split([count for _, count in self.sequences]))

    def oracle(self) -> list[torch.Tensor]:
        """What comes out in float64, by gathering and one softmax over all."""
        return [self._attended(sequence) for sequence in range(len(self.sequences))]

    def _attended(self, sequence: int) -> torch.Tensor:
        model = self.model
        written = self.keys[sequence], self.values[sequence]
        keys, values = (
            as_stored(rows, form).double() for rows, form in zip(written, FORMS[model.kv_dtype], strict=True)
        )
        length, count = self.sequences[sequence]
        queries = self.queries[sequence].double().unflatten(1, (model.num_kv_heads, model.group))
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * model.rule.scale
        if model.soft_cap is not None:
            scores = model.soft_cap * torch.tanh(scores / model.soft_cap)
        distance = torch.arange(length - count, length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (model.window or length))
        scores = scores.masked_fill(~seen, -math.inf)
        if model.rule.sinks is not None:
            sinks = model.rule.sinks.double().view(model.num_kv_heads, model.group, 1, 1)
            scores = torch.cat((scores, sinks.expand(*scores.shape[:3], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :length]
        return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)


def as_stored(rows: torch.Tensor, form: torch.dtype | int) -> torch.Tensor:
    """Return rows rounded as memory holds them: `form` is a dtype, or the numbers of a group of 4 bits, 0 for all."""
    if isinstance(form, int):
        return torch.from_numpy(rounded_to_int4(rows.float().numpy(), form or None))
    if form in (torch.int8, torch.float8_e4m3fn):
        return restored(*quantized(rows, form))
    return rows.to(form)
