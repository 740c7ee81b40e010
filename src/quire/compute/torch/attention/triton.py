"""TritonAttention: paged attention by Triton kernels; the work list of a step is made on the host, without waiting.

    plan    lengths, tables (numpy) ─► work lists ─► one page-locked array ─► one copy ─► views on the device
    run     attend_kernel: decodes        ─┐
            attend_kernel: longer queries ─┴► outputs, parts ─► merge_kernel ─► outputs
    reserve a plan with room for any step of this many decodes, to be recorded; each step is copied into it

A decode fills few rows of a matrix product, so decodes and longer queries take kernels of different tile shapes, and
the same position may come out with other bits if it was computed by the other one. Within each of them a row's bits are
its own (`kernels.paged_attention`). With `batch_invariant` all go through one tile shape: then a row's bits are also
the same whether it was decoded or prefilled, in one chunk or in several.

All that a launch of decodes is shaped by is the number of its programs, and one without a task returns at once. So a
launch for more tasks than there are does what the smaller one does: that is what is recorded.
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
from quire.compute.torch.kernels.merge import AT_A_TIME, Results, merge
from quire.compute.torch.kernels.paged_attention import Cache, Queries, Weighting, Work, attend
from quire.compute.torch.kernels.tile_shape import SPLIT, TileShape, Use
from quire.compute.torch.upload import Shape, apart, joined, on_device, together
from quire.core.kv_spec import DTYPE_BYTES, KVCacheSpec, KVGroup

TASKS_EACH: Final = 2
ENTRIES_EACH: Final = 5
"""Entries per decode of the room for a step: for a prefix that all share, up to 2,048 tokens."""
SPARE_TASKS: Final = 128
SPARE_ENTRIES: Final = 512
"""Additional entries, for contexts that are cut."""
LONGEST_SHARE: Final = 0.75
"""Of what each multiprocessor has to do in a step: longer tasks are cut, so that none keeps all others waiting."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A work list on the device, and the shape of the kernel that does it."""

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
    """What all layers of a step share. `launches` are per KV group.

    `outputs`, where they are given, are those of every layer in turn: rows without work stay what they were there.
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
                kv_bytes=DTYPE_BYTES[spec.dtype],
                capability=_capability(device),
            )
            for use in Use
        }

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, their content undefined."""
        return KVPool.allocate(spec, num_blocks, self._device)

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, where the slot is not -1. Mutates."""
        self._plain.write_kv(pair, slots, keys, values)

    def plan(self, batch: StepBatch) -> PlannedStep:
        """Return the work lists of a step, on their way to the device. Waits for nothing."""
        groups = self.work(batch)
        pieces = iter(together([array for works in groups for _, work in works for array in work.arrays], self._device))
        launches = (
            tuple(Launch.of(shape, islice(pieces, 4), work.num_parts, work.most_parts) for shape, work in works)
            for works in groups
        )
        return PlannedStep(batch, tuple(launches))

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> StandingWork:
        """Return room for the work of steps of up to as many decodes, with tables as large as those of the batch."""
        outputs = (len(batch.positions), self._num_heads, self._spec.head_dim)
        zeros = torch.zeros(outputs, dtype=dtype, device=batch.positions.device)
        return StandingWork(self, batch, zeros, self._shapes[Use.ANY if self._batch_invariant else Use.DECODE])

    def run(self, queries: torch.Tensor, pair: KVPair, planned: PlannedStep, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`. Mutates the outputs of the plan."""
        outputs = torch.empty_like(queries) if planned.outputs is None else planned.outputs
        scales = None
        if pair.key_scales is not None and pair.value_scales is not None:
            scales = pair.key_scales, pair.value_scales
        cache = Cache.of((pair.keys, pair.values), scales, planned.batch.block_tables[pair.group])
        weighting = Weighting.of(rule.scale, rule.window, rule.soft_cap)
        for launch in planned.launches[pair.group]:
            results = Results.of(outputs, launch.num_parts)
            attend(launch.shape, Queries.of(queries, planned.batch.positions), cache, launch.work, results, weighting)
            if launch.num_parts:
                merge(launch.merges, results, weighting.exponent_scale, launch.most_parts)
        return outputs

    def work(self, batch: StepBatch) -> list[list[tuple[TileShape, WorkList]]]:
        """Return the kernels of a step and what each has to do, per KV group; tasks name where their tables begin."""
        groups = []
        for group, tables in enumerate(batch.block_tables):
            to_tables = np.array((1, 1, tables.stride(0), 1, 1))  # from a sequence to where its table begins
            works = self._work(batch.shape, group)
            groups.append([(shape, replace(work, tasks=work.tasks * to_tables)) for shape, work in works])
        return groups

    def _work(self, step: StepShape, group: int) -> Iterator[tuple[TileShape, WorkList]]:
        """Yield the kernels of a step and what each has to do, for one KV group."""
        sequences, decodes = range(step.num_sequences), range(step.num_decodes)
        if self._batch_invariant:
            yield self._decode_work(step, sequences, group, self._shapes[Use.ANY])
            return
        if decodes:
            yield self._decode_work(step, decodes, group, self._shapes[Use.DECODE])
        if len(decodes) < len(sequences):
            shape, longer = self._shapes[Use.PROMPT], sequences[len(decodes) :]
            window = self._spec.groups[group].window
            tiles = Tiles.of(step.query_starts, step.lengths, longer, shape.tokens_per_task)
            yield shape, work_list(tiles, window=window)

    def _decode_work(
        self, step: StepShape, sequences: range, index: int, shape: TileShape
    ) -> tuple[TileShape, WorkList]:
        """Return the work of a kernel that folds splits: cut where it pays, with prefixes that decodes share."""
        group = self._spec.groups[index]
        tiles = Tiles.of(step.query_starts, step.lengths, sequences, shape.tokens_per_task)
        prefixes = []
        if group.window is None:
            tables, lengths = step.block_tables[index][: step.num_decodes], step.lengths[: step.num_decodes]
            prefixes = shared_prefixes(tables, lengths, self._spec.block_size, SPLIT)
        return shape, work_list(
            tiles,
            window=group.window,
            longest_task=self._longest_task(tiles, group),
            prefixes=prefixes,
            tokens_per_task=shape.tokens_per_task,
        )

    def _longest_task(self, tiles: Tiles, group: KVGroup) -> int:
        """Return how many positions one task may have in a step."""
        seen = tiles.stops if group.window is None else np.minimum(tiles.stops, group.window)
        return int(LONGEST_SHARE * int(seen.sum()) * self._spec.num_kv_heads / self._num_processors)


class StandingWork:
    """Room for the work of decodes, filled anew for each step; implements `StandingPlan`.

    There is room for all that common steps need. A step that needs more, of very long contexts or prefixes that very
    many share, takes so long that its launches are hidden.
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
        """Put the work and the tables of a step where they are read; return False where there is no room for them."""
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
    """Return how many programs run at once; the interpreter runs one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _capability(device: torch.device) -> int:
    """Return what a GPU can do, 90 for 9.0; the interpreter can do what any of them can."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor
