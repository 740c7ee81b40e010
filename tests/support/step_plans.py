"""A driver that plans steps by hand: rows with their own tokens and tables, in chosen blocks.

It stands where a scheduler and a memory manager would stand, without any policy: tests say exactly
which row computes how many tokens, and which physical blocks it holds.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from quire.core.kv_spec import KVCacheSpec
from quire.core.request import CacheScope
from quire.core.sampling_params import SamplingParams
from quire.core.step import BlockCopy, BlockMove, RowStart, StepPlan, TableChanges, column

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Work:
    """What one row computes in a step: `count` tokens from `start`."""

    row: int
    start: int
    count: int
    samples: int = 0
    drafts: Sequence[int] = ()


@dataclass(slots=True)
class PlanDriver:
    """Makes plans; gives every row blocks as it needs them, from `free` in the order given."""

    spec: KVCacheSpec
    free: Iterator[int]
    tables: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    _starts: list[RowStart] = field(default_factory=list)
    _released: list[int] = field(default_factory=list)
    _changes: list[tuple[int, int, int, int]] = field(default_factory=list)
    _step: int = 0

    @classmethod
    def over(cls, spec: KVCacheSpec, blocks: Iterable[int]) -> PlanDriver:
        """Return a driver that hands out the given blocks."""
        return cls(spec, iter(blocks))

    def open(self, row: int, tokens: Sequence[int], sampling: SamplingParams = GREEDY, adapter: str = "") -> None:
        """Let a request take a row, with empty tables."""
        scope = CacheScope(adapter=adapter)
        start = RowStart(row, f"r{row}", array("i", tokens), len(tokens), sampling, 1 << 20, scope=scope)
        self._starts.append(start)
        for group in range(len(self.spec.groups)):
            self.tables[row, group] = []

    def release(self, row: int) -> None:
        """Release a row; its blocks are not given out again."""
        self._released.append(row)

    def hold(self, row: int, num_tokens: int) -> None:
        """Give the row blocks for so many tokens, in every group."""
        for group in range(len(self.spec.groups)):
            while len(self.tables[row, group]) * self.spec.block_size < num_tokens:
                self.set_block(row, group, len(self.tables[row, group]), next(self.free))

    def set_block(self, row: int, group: int, index: int, block: int) -> None:
        """Change one entry of a table."""
        table = self.tables[row, group]
        table[index : index + 1] = [block]
        self._changes.append((row, group, index, block))

    def plan(
        self,
        *works: Work,
        moves_out: Sequence[BlockMove] = (),
        copies: Sequence[BlockCopy] = (),
        moves_in: Sequence[BlockMove] = (),
    ) -> StepPlan:
        """Return the plan of a step, with all changes since the last one."""
        for work in works:
            self.hold(work.row, work.start + work.count)
        starts, released, changes = self._starts, self._released, self._changes
        self._starts, self._released, self._changes = [], [], []
        self._step += 1
        drafts: Mapping[int, Sequence[int]] = {w.row: w.drafts for w in works if w.drafts}
        return StepPlan(
            step_id=self._step,
            rows=column(*(work.row for work in works)),
            starts=column(*(work.start for work in works)),
            counts=column(*(work.count for work in works)),
            samples=column(*(work.samples for work in works)),
            row_starts=tuple(starts),
            released_rows=column(*released),
            tables=TableChanges.of(changes),
            drafts={row: array("i", tokens) for row, tokens in drafts.items()},
            moves_out=tuple(moves_out),
            copies=tuple(copies),
            moves_in=tuple(moves_in),
        )


def chunks_of(length: int, size: int) -> list[int]:
    """Return the chunks of a text that is computed so many tokens at a time."""
    return [min(size, length - start) for start in range(0, length, size)]


def shuffled(count: int) -> list[int]:
    """Return the numbers of blocks, in an order that is the same in each run."""
    blocks = list(range(count))
    random.Random(0).shuffle(blocks)
    return blocks
