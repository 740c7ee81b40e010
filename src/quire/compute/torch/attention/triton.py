"""TritonAttention: paged attention by Triton kernels; the host makes the work list of a step without waiting.

    plan    lengths, tables (numpy) ─► work lists ─► one page-locked array ─► one copy ─► views on the device
    run     attend_kernel: short queries  ─┐
            attend_kernel: longer queries ─┴► outputs, parts ─► merge_kernel ─► outputs
    reserve a plan with room for any step of this many tokens, for recording; each step is copied into it

A short query, a decode with the guesses behind it or without any, fills few rows of a matrix product. So short queries
and longer ones use kernels of different tile shapes, and these may give the same position different bits. Within each
kernel, a row's bits do not depend on other rows (`kernels.paged_attention`). With `batch_invariant` all rows use one
tile shape: a row's bits are then the same for decode and prefill, in one chunk or several.

A launch of short queries differs only in its number of programs, and a program without a task returns at once. So a
launch with too many programs gives the same results: recordings use that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

import numpy as np
import torch

from quire.compute.torch.attention.base import AttentionRule, KVPair, KVPool, StepBatch, StepShape
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.attention.shared_prefix import shared_prefixes
from quire.compute.torch.attention.work import Tiles, WorkList, work_list
from quire.compute.torch.int4 import INT4
from quire.compute.torch.kernels.int4 import turn
from quire.compute.torch.kernels.merge import AT_A_TIME, Results, merge
from quire.compute.torch.kernels.paged_attention import Cache, Queries, Weighting, Work, attend
from quire.compute.torch.kernels.tile_shape import SPLIT, TileShape, Use
from quire.compute.torch.upload import Shape, apart, joined, on_device, together
from quire.core.kv_spec import KV_FORMS, KVCacheSpec, KVGroup

TASKS_EACH: Final = 2
ENTRIES_EACH: Final = 5
"""Entries per decode of the room for a step: for a prefix that all share, up to 2,048 tokens."""
SPARE_TASKS: Final = 128
SPARE_ENTRIES: Final = 512
"""Additional entries, for contexts that are cut."""
LONGEST_SHARE: Final = 0.75
"""Share of a multiprocessor's work in a step: longer tasks are cut, so that the others need not wait for one."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A work list on the device, and the shape of its kernel."""

    shape: TileShape
    work: Work
    merges: torch.Tensor
    num_parts: int
    most_parts: int

    @classmethod
    def of(cls, shape: TileShape, arrays: Iterable[torch.Tensor], num_parts: int, most_parts: int) -> Launch:
        """Return a launch of the arrays of a work list."""
        tasks, tokens, parts, merges = arrays
        return cls(shape, Work(tasks, tokens, parts), merges, num_parts, most_parts)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The plan that all layers of a step share. `launches` are per KV group.

    `outputs`, if given, are reused by every layer: rows without work keep their old content.
    """

    batch: StepBatch
    launches: tuple[tuple[Launch, ...], ...]
    outputs: torch.Tensor | None = None  # [num_tokens, num_heads, head_dim]


class TritonAttention:
    """Triton kernels over a `KVPool`; implements `AttentionBackend`. Immutable."""

    def __init__(
        self,
        spec: KVCacheSpec,
        device: torch.device,
        *,
        num_heads: int,
        num_processors: int | None = None,
        batch_invariant: bool = False,
    ) -> None:
        self._spec = spec
        self._device = device
        self._num_heads = num_heads
        self._batch_invariant = batch_invariant
        self._num_processors = num_processors or _num_processors(device)
        self._plain = PlainAttention(device)
        self._shapes = {
            use: TileShape.of(
                use,
                head_dim=spec.head_dim,
                group=num_heads // spec.num_kv_heads,
                block_size=spec.block_size,
                kv_bits=KV_FORMS[spec.dtype][1].bits,
                capability=_capability(device),
            )
            for use in Use
        }

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, with undefined content."""
        return KVPool.allocate(spec, num_blocks, self._device)

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, except for slots of -1. Mutates."""
        self._plain.write_kv(pair, slots, keys, values)

    def plan(self, batch: StepBatch) -> PlannedStep:
        """Return the work lists of a step, whose copy to the device has started. Does not wait."""
        groups = self.work(batch)
        pieces = iter(together([array for works in groups for _, work in works for array in work.arrays], self._device))
        launches = (
            tuple(Launch.of(shape, islice(pieces, 4), work.num_parts, work.most_parts) for shape, work in works)
            for works in groups
        )
        return PlannedStep(batch, tuple(launches))

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> StandingWork:
        """Return room for the work of steps of up to as many tokens, with tables as large as those of the batch."""
        outputs = (len(batch.positions), self._num_heads, self._spec.head_dim)
        zeros = torch.zeros(outputs, dtype=dtype, device=batch.positions.device)
        return StandingWork(self, batch, zeros, self._shapes[Use.ANY if self._batch_invariant else Use.DECODE])

    def run(self, queries: torch.Tensor, pair: KVPair, planned: PlannedStep, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`. Mutates the outputs of the plan."""
        outputs = torch.empty_like(queries) if planned.outputs is None else planned.outputs
        if pair.keys.dtype is INT4:
            queries = turn(queries)
        cache = Cache.of(pair, planned.batch.block_tables[pair.group])
        weighting = Weighting.of(rule)
        for launch in planned.launches[pair.group]:
            results = Results.of(outputs, launch.num_parts)
            attend(launch.shape, Queries.of(queries, planned.batch.positions), cache, launch.work, results, weighting)
            if launch.num_parts:
                merge(launch.merges, results, rule.sinks, weighting.exponent_scale, launch.most_parts)
        return turn(outputs) if pair.values.dtype is INT4 else outputs

    def work(self, batch: StepBatch) -> list[list[tuple[TileShape, WorkList]]]:
        """Return the kernels of a step and the work of each, per KV group; tasks have the offsets of their tables."""
        groups = []
        for group, tables in enumerate(batch.block_tables):
            to_tables = np.array((1, 1, tables.stride(0), 1, 1))  # from a sequence to the offset of its table
            works = self._work(batch.shape, group)
            groups.append([(shape, replace(work, tasks=work.tasks * to_tables)) for shape, work in works])
        return groups

    def _work(self, step: StepShape, group: int) -> Iterator[tuple[TileShape, WorkList]]:
        """Yield the kernels of a step and the work of each, for one KV group."""
        sequences, short = range(step.num_sequences), range(step.num_short)
        if self._batch_invariant:
            yield self._work_of(step, sequences, group, self._shapes[Use.ANY])
            return
        if short:
            yield self._work_of(step, short, group, self._shapes[Use.DECODE])
        if len(short) < len(sequences):
            yield self._work_of(step, sequences[len(short) :], group, self._shapes[Use.PROMPT])

    def _work_of(self, step: StepShape, sequences: range, index: int, shape: TileShape) -> tuple[TileShape, WorkList]:
        """Return the work of a kernel: cut if that pays, with prefixes that single tokens share."""
        group = self._spec.groups[index]
        tiles = Tiles.of(step.query_starts, step.lengths, sequences, shape.tokens_per_task)
        prefixes = []
        if group.window is None:
            single = np.flatnonzero(tiles.counts == 1)
            tables = step.block_tables[index][tiles.sequences[single]]
            shared = shared_prefixes(tables, tiles.stops[single], self._spec.block_size, SPLIT)
            prefixes = [replace(prefix, tiles=single[prefix.tiles]) for prefix in shared]
        return shape, work_list(
            tiles,
            window=group.window,
            longest_task=self._longest_task(tiles, group),
            prefixes=prefixes,
            tokens_per_task=shape.tokens_per_task,
        )

    def _longest_task(self, tiles: Tiles, group: KVGroup) -> int:
        """Return the most positions of a task in a step."""
        seen = tiles.stops if group.window is None else np.minimum(tiles.stops, group.window)
        return int(LONGEST_SHARE * int(seen.sum()) * self._spec.num_kv_heads / self._num_processors)


class StandingWork:
    """Room for the work of short queries, refilled for each step; implements `StandingPlan`.

    It has room for common steps. A step that needs more, for very long contexts or widely shared prefixes, takes so
    long that the time of its launches is hidden.
    """

    def __init__(self, attention: TritonAttention, batch: StepBatch, outputs: torch.Tensor, shape: TileShape) -> None:
        self._attention = attention
        count = len(batch.positions)
        num_entries = ENTRIES_EACH * count + SPARE_ENTRIES
        room = [(TASKS_EACH * count + SPARE_TASKS, 5), (num_entries,), (num_entries,), (count, 3)]
        self._shapes: list[Shape] = room * len(batch.block_tables)
        nothing = [np.zeros(shape, np.int64) for shape in self._shapes]
        self._whole = on_device(joined(nothing, self._shapes), batch.positions.device)
        pieces = iter(apart(self._whole, self._shapes))
        launches = tuple((Launch.of(shape, islice(pieces, 4), num_entries, AT_A_TIME),) for _ in batch.block_tables)
        self.planned = PlannedStep(batch, launches, outputs)

    def plan(self, batch: StepBatch) -> bool:
        """Copy the work and the tables of a step into the room; return False if they do not fit."""
        arrays = [array for works in self._attention.work(batch) for _, work in works for array in work.arrays]
        rooms = self.planned.batch.block_tables
        if any(len(array) > shape[0] for array, shape in zip(arrays, self._shapes, strict=True)):
            return False
        if any(given.numel() > len(room) for given, room in zip(batch.block_tables, rooms, strict=True)):
            return False
        self._whole.copy_(on_device(joined(arrays, self._shapes), self._whole.device))
        for room, given in zip(rooms, batch.block_tables, strict=True):
            room[: given.numel()].copy_(given.flatten())
        return True


def _num_processors(device: torch.device) -> int:
    """Return the number of programs that run at once; the interpreter runs one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _capability(device: torch.device) -> int:
    """Return the compute capability, 90 for 9.0; the interpreter supports all of them."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor
