"""TritonAttention: paged attention by Triton kernels; the host makes the work list of a step without waiting.

    plan    lengths, tables (numpy) ─► work lists ─► one page-locked array ─► one copy ─► views on the device
    run     attend_kernel: short queries  ─┐
            attend_kernel: longer queries ─┴► outputs, parts ─► merge_kernel ─► outputs
    reserve plans with room for steps of this many tokens, for recording; each step is copied into one of them

A short query (a decode, with or without draft tokens) fills few rows of a matrix product. So short queries and longer
ones use kernels of different tile shapes, and these may give the same position different bits. Within each
kernel, a row's bits do not depend on other rows (`kernels.paged_attention`). With `batch_invariant` all rows use one
tile shape: a row's bits are then the same for decode and prefill, in one chunk or several.

A launch differs only in its number of programs, and a program without a task returns at once. So a launch with too many
programs gives the same results: recordings use that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import reduce
from itertools import chain, islice
from typing import Final, TypeAlias

import numpy as np
import torch

from quire.compute.arrays import IntArray
from quire.compute.torch.attention.base import MOST_SHORT, AttentionRule, KVPair, KVPool, StepBatch, StepShape
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.attention.shared_prefix import shared_prefixes
from quire.compute.torch.attention.work import MOST_PARTS, NO_WORK, Tiles, WorkList, work_lists
from quire.compute.torch.int4 import INT4
from quire.compute.torch.kernels.int4 import turn
from quire.compute.torch.kernels.merge import AT_A_TIME, Results, merge
from quire.compute.torch.kernels.paged_attention import Cache, Queries, Weighting, Work, attend
from quire.compute.torch.kernels.tile_shape import TileShape, Use
from quire.compute.torch.upload import Shape, apart, fill, joined, on_device, together
from quire.core.kv_spec import KV_FORMS, KVCacheSpec, KVGroup, KVHeads

TASKS_EACH: Final = 2
ENTRIES_EACH: Final = 9
"""Entries per token of short queries, in the room for a step: enough for a prefix of 2,048 tokens that all share."""
SPARE_TASKS: Final = 256
SPARE_ENTRIES: Final = 1024
"""Additional entries, for contexts that are cut."""
LEAST_TOKENS_OF_TASK: Final = 4
"""Of longer queries: a step has room for one task per this many tokens."""
UNCUT_FROM: Final = 32
"""From this many decodes of about the same length on, none is cut: each is a multiprocessor's share or less."""
FEW_DECODES: Final = 16
"""The decodes next to prompts for which there is a place of its own."""
SPARE_USUAL: Final = 32
"""Additional tasks for few decodes, enough for one with a context of 8,000 tokens."""
SPARE_UNCUT: Final = 16
"""Additional tasks for prompts that are not cut."""
MOST_MERGED: Final = 1024
"""The most tokens of longer queries that are computed in parts, in the room for a step."""
Shapes: TypeAlias = Sequence[Mapping[Use, TileShape]]
"""The shapes of kernels for each KV group: its heads can be wider than those of others."""
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

    `outputs`, if given, are reused by every layer: rows without work keep their old content. They have room for the
    widest heads. `lasts`: the last position that each token sees, per KV group; empty: its own.
    """

    batch: StepBatch
    launches: tuple[tuple[Launch, ...], ...]
    outputs: torch.Tensor | None = None  # [num_tokens × num_heads × head_dim]
    lasts: tuple[torch.Tensor, ...] = ()


class TritonAttention:
    """Triton kernels over a `KVPool`; implements `AttentionBackend`. Immutable.

    `shape`: the shape of all kernels, instead of the best known ones, for a search for better ones.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        device: torch.device,
        *,
        num_heads: int,
        num_processors: int | None = None,
        batch_invariant: bool = False,
        shape: TileShape | None = None,
    ) -> None:
        self._spec = spec
        self._device = device
        self._num_heads = num_heads
        self._batch_invariant = batch_invariant
        self._num_processors = num_processors or _num_processors(device)
        self._plain = PlainAttention(device)
        self._most_head_dim = max(spec.heads_of(group).head_dim for group in spec.groups)
        self.shapes: Shapes = [
            {use: shape or self._shape_of(use, spec.heads_of(group)) for use in Use} for group in spec.groups
        ]

    def _shape_of(self, use: Use, heads: KVHeads) -> TileShape:
        return TileShape.of(
            use,
            head_dim=heads.head_dim,
            group=self._num_heads // heads.num_kv_heads,
            block_size=self._spec.block_size,
            kv_bits=KV_FORMS[self._spec.dtype][1].bits,
            capability=_capability(self._device),
        )

    @property
    def block_size(self) -> int:
        """The tokens of a block."""
        return self._spec.block_size

    def allocate_kv(self, spec: KVCacheSpec, num_blocks: int) -> KVPool:
        """Return this many blocks on the device, with undefined content."""
        return KVPool.allocate(spec, num_blocks, self._device)

    def write_kv(self, pair: KVPair, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, `[num_tokens, num_kv_heads, head_dim]`, except for slots of -1. Mutates."""
        self._plain.write_kv(pair, slots, keys, values)

    def plan(self, batch: StepBatch) -> PlannedStep:
        """Return the work lists of a step, whose copy to the device has started. Does not wait."""
        groups = self.work(batch.shape)
        lasts = [each for group in self._spec.groups if (each := batch.shape.lasts(group.window)) is not None]
        arrays = [array for works in groups for _, work in works for array in work.arrays]
        pieces = iter(together([*arrays, *lasts], self._device))
        launches = (
            tuple(Launch.of(shapes[use], islice(pieces, 4), work.num_parts, work.most_parts) for use, work in works)
            for shapes, works in zip(self.shapes, groups, strict=True)
        )
        return PlannedStep(batch, tuple(launches), lasts=tuple(pieces))

    def reserve(self, batch: StepBatch, dtype: torch.dtype) -> StandingWork:
        """Return places for the work of steps of up to as many tokens as the batch, with tables of the same size."""
        outputs = len(batch.positions) * self._num_heads * self._most_head_dim
        zeros = torch.zeros(outputs, dtype=dtype, device=batch.positions.device)
        num_short = batch.shape.num_short
        choices = [{Use.DECODE: room} for room in (Room.of_usual(num_short), Room.of_short(num_short))]
        if batch.shape.longest_query > MOST_SHORT:
            choices = self._rooms_with_prompts(num_short, len(batch.positions))
        if self._batch_invariant:
            choices = [{Use.ANY: reduce(Room.with_room_of, rooms.values())} for rooms in choices]
        return StandingWork(self, choices[0], [_Place.of(self.shapes, batch, zeros, rooms) for rooms in choices])

    def _rooms_with_prompts(self, num_short: int, num_tokens: int) -> list[dict[Use, Room]]:
        """Return the rooms for steps with prompts: next to few decodes, next to many, and with tiles that are cut."""
        use = Use.ANY if self._batch_invariant else Use.PROMPT
        tokens_per_task = min(shapes[use].tokens_per_task for shapes in self.shapes)
        uncut = Room.of_uncut(num_tokens, min(MOST_SHORT, tokens_per_task))
        num_short = min(num_short, num_tokens - MOST_SHORT)
        counts = (num_short,) if num_short < UNCUT_FROM else (FEW_DECODES, num_short)
        rooms = [{Use.DECODE: Room.of_usual(count), Use.PROMPT: uncut} for count in counts]
        return [*rooms, {Use.DECODE: Room.of_short(num_short), Use.PROMPT: Room.of_longer(num_tokens)}]

    def run(self, queries: torch.Tensor, pair: KVPair, planned: PlannedStep, rule: AttentionRule) -> torch.Tensor:
        """Return the attention of each query, `[num_tokens, num_heads, head_dim]`. Mutates the outputs of the plan."""
        room = planned.outputs
        outputs = torch.empty_like(queries) if room is None else room[: queries.numel()].view(queries.shape)
        if pair.keys.dtype is INT4:
            queries = turn(queries)
        cache = Cache.of(pair, planned.batch.block_tables[pair.group])
        weighting, positions, lasts = Weighting.of(rule), planned.batch.positions, None
        if planned.lasts:
            lasts = planned.lasts[pair.group]
            if rule.window is None:  # then nothing depends on where a token is
                positions, lasts = lasts, None
        if rule.chunked and rule.window is not None:
            # The window that ends with a token's chunk is the chunk.
            lasts = positions if lasts is None else lasts
            positions = positions - positions % rule.window + (rule.window - 1)
        of_tokens = Queries.of(queries, positions, lasts)
        for launch in planned.launches[pair.group]:
            results = Results.of(outputs, launch.num_parts)
            attend(launch.shape, of_tokens, cache, launch.work, results, weighting)
            if launch.num_parts:
                merge(launch.merges, results, rule.sinks, weighting.exponent_scale, launch.most_parts)
            del results  # the next launch reuses its memory
        return turn(outputs) if pair.values.dtype is INT4 else outputs

    def work(self, shape: StepShape) -> list[list[tuple[Use, WorkList]]]:
        """Return the kernels of a step and the work of each, per KV group; tasks have the offsets of their tables."""
        starts = shape.table_starts(self._spec.block_size)
        groups = [list(self._work(shape, group)) for group in range(len(shape.block_tables))]
        for _, work in chain.from_iterable(groups):
            work.tasks[:, 2] = starts[work.tasks[:, 2]]
        return groups

    def _work(self, step: StepShape, group: int) -> Iterator[tuple[Use, WorkList]]:
        """Yield the kernels of a step and the work of each, for one KV group."""
        is_short = np.diff(step.query_starts) <= MOST_SHORT
        kernels = [(Use.DECODE, np.flatnonzero(is_short)), (Use.PROMPT, np.flatnonzero(~is_short))]
        if self._batch_invariant:
            kernels = [(Use.ANY, np.arange(step.num_sequences))]
        for use, sequences in kernels:
            if len(sequences):
                for work in self._works_of(step, sequences, group, use):
                    yield use, work

    def _works_of(self, step: StepShape, sequences: IntArray, index: int, use: Use) -> list[WorkList]:
        """Return the work of a kernel, launch by launch: cut if that pays, with prefixes that single tokens share."""
        group, shape = self._spec.groups[index], self.shapes[index][use]
        lasts = step.lasts(group.window)
        tiles = Tiles.of(step.query_starts, step.lengths, sequences, shape.tokens_per_task, lasts)
        prefixes = []
        if group.window is None:
            single = np.flatnonzero(tiles.counts == 1)
            tables, rows = step.block_tables[index], tiles.sequences[single]
            shared = shared_prefixes(tables, tiles.stops[single], self._spec.block_size, shape.split, rows)
            prefixes = [replace(prefix, tiles=single[prefix.tiles]) for prefix in shared]
        return work_lists(
            tiles,
            window=group.window,
            longest_task=self._longest_task(tiles, group),
            prefixes=prefixes,
            tokens_per_task=shape.tokens_per_task,
            split=shape.split,
        )

    def _longest_task(self, tiles: Tiles, group: KVGroup) -> int:
        """Return the most positions of a task in a step."""
        seen = tiles.stops if group.window is None else np.minimum(tiles.stops, group.window)
        return int(LONGEST_SHARE * int(seen.sum()) * self._spec.heads_of(group).num_kv_heads / self._num_processors)


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of a launch of a recorded step."""

    num_tasks: int = 0
    num_entries: int = 0
    num_merges: int = 0
    num_parts: int = 0

    @classmethod
    def of_short(cls, num_tokens: int) -> Room:
        """Return room for this number of tokens of short queries."""
        num_entries = ENTRIES_EACH * num_tokens + SPARE_ENTRIES
        return cls(TASKS_EACH * num_tokens + SPARE_TASKS, num_entries, num_tokens, num_entries)

    @classmethod
    def of_usual(cls, num_tokens: int) -> Room:
        """Return the room that most steps with this many tokens of short queries need: few are cut, many are not.

        >>> Room.of_usual(1).num_tasks, Room.of_short(1).num_tasks
        (33, 258)
        >>> Room.of_usual(256).num_tasks, Room.of_short(256).num_tasks
        (256, 768)
        """
        if num_tokens >= UNCUT_FROM:
            return cls(num_tokens, num_tokens)
        num_tasks = num_tokens + SPARE_USUAL
        num_entries = num_tokens + LEAST_TOKENS_OF_TASK * SPARE_USUAL
        return cls(num_tasks, num_entries, num_tokens, num_entries)

    @classmethod
    def of_uncut(cls, num_tokens: int, tokens_each: int) -> Room:
        """Return room for this number of tokens of longer queries in uncut tiles of about `tokens_each` tokens."""
        return cls(num_tokens // tokens_each + SPARE_UNCUT, num_tokens)

    @classmethod
    def of_longer(cls, num_tokens: int) -> Room:
        """Return room for this number of tokens of longer queries."""
        num_tasks = num_tokens // LEAST_TOKENS_OF_TASK + SPARE_TASKS
        num_entries = num_tokens + MOST_PARTS  # each part has an entry, also the parts of shared prefixes
        return cls(num_tasks, num_entries, min(num_tokens, MOST_MERGED), num_entries)

    def with_room_of(self, other: Room) -> Room:
        """Return room for the work of both."""
        return Room(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of the arrays of a work list."""
        return [(self.num_tasks, 5), (self.num_entries,), (self.num_entries,), (self.num_merges, 3)]


@dataclass(frozen=True, slots=True)
class _Place:
    """A place for the work of a recorded step. `whole`: all its arrays, joined; `planned` has views of them."""

    shapes: list[Shape]
    whole: torch.Tensor
    planned: PlannedStep

    @classmethod
    def of(cls, shapes_of: Shapes, batch: StepBatch, outputs: torch.Tensor, rooms: Mapping[Use, Room]) -> _Place:
        """Return a place with room for each kernel and KV group, and without work."""
        shapes = [shape for room in rooms.values() for shape in room.shapes] * len(batch.block_tables)
        nothing = [array for _ in batch.block_tables for _ in rooms for array in NO_WORK.arrays]
        whole = on_device(joined(nothing, shapes), batch.positions.device)
        pieces = iter(apart(whole, shapes))
        launches = tuple(
            tuple(Launch.of(of_group[use], islice(pieces, 4), room.num_parts, AT_A_TIME) for use, room in rooms.items())
            for of_group in shapes_of
        )
        return cls(shapes, whole, PlannedStep(batch, launches, outputs))

    def takes(self, works: Sequence[WorkList]) -> bool:
        """Return whether there is room for the work of each launch of a step, and for its parts."""
        lengths = [len(array) for work in works for array in work.arrays]
        launches = chain.from_iterable(self.planned.launches)
        return all(length <= shape[0] for length, shape in zip(lengths, self.shapes, strict=True)) and all(
            work.num_parts <= launch.num_parts for work, launch in zip(works, launches, strict=True)
        )


class StandingWork:
    """Places for the work of a recorded step, refilled for each; implements `StandingPlan`.

    They have room for common steps. A step that needs more, for very long contexts or widely shared prefixes, runs so
    long that its launches cost no additional time.
    """

    def __init__(self, attention: TritonAttention, uses: Iterable[Use], places: Sequence[_Place]) -> None:
        self._attention = attention
        self._uses = tuple(uses)
        self._places = places
        self.planned = [place.planned for place in places]

    def plan(self, shape: StepShape) -> int | None:
        """Copy a step's work and tables into the smallest place with room for it, and return its index, or None."""
        groups = self._attention.work(shape)
        if any(len(dict(works)) < len(works) for works in groups):  # a kernel has several launches
            return None
        works = [by_use.get(use, NO_WORK) for by_use in map(dict, groups) for use in self._uses]
        index = next((number for number, place in enumerate(self._places) if place.takes(works)), None)
        rooms = self.planned[0].batch.block_tables  # all places have the same
        tables = shape.needed_tables(self._attention.block_size)
        if index is None or any(len(table) > len(room) for table, room in zip(tables, rooms, strict=True)):
            return None
        place = self._places[index]
        arrays = [array for work in works for array in work.arrays]
        fill(place.whole, joined(arrays, place.shapes))
        for table, room in zip(tables, rooms, strict=True):
            fill(room[: len(table)], table.astype(np.int32))
        return index


def _num_processors(device: torch.device) -> int:
    """Return the number of programs that run at once; the interpreter runs one."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _capability(device: torch.device) -> int:
    """Return the compute capability, 90 for 9.0; the interpreter supports all of them."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return 10 * major + minor
