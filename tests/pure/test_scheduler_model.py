"""The plans of the scheduler, to the token, against a scheduler of a few lines.

The model has the rules of first come, first served over one KV group: no cache, no swap, a step at a time. It knows
counts alone, no block ids: who takes how many tokens in each step, who yields, who starts, how many blocks are held.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import given

from support.control import Control

BLOCK = 4

Entry = tuple[str, int, int, int]
"""Of a plan: who, from where, how many tokens, how many samples."""


@dataclass
class Sequence:
    """A request as the model knows it."""

    name: str
    known: int
    longest: int
    planned: int = 0
    blocks: int = 0

    @property
    def backlog(self) -> int:
        return max(1, self.known - self.planned)


@dataclass
class Model:
    """A scheduler of a few lines."""

    num_blocks: int
    max_num_seqs: int
    max_step_tokens: int
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    order: list[str] = field(default_factory=list)
    num_preemptions: int = 0

    def add(self, name: str, length: int, max_tokens: int) -> None:
        self.order.append(name)
        self.waiting.append(Sequence(name, length, length + max_tokens))

    @property
    def num_free(self) -> int:
        return self.num_blocks - sum(one.blocks for one in self.running)

    def step(self) -> list[Entry]:
        """Plan a step and commit it; decodes stand first."""
        budget, before = max(self.max_step_tokens, len(self.running)), self.num_preemptions
        taken: list[Entry] = []
        for one in list(self.running):
            if one in self.running:
                behind = len(self.running) - self.running.index(one) - 1
                left = budget - sum(entry[2] for entry in taken) - behind
                self._take(one, min(one.backlog, left, one.longest - 1 - one.planned), taken)
        if self.num_preemptions == before:
            self._admit(budget, taken)
        for one in list(self.running):
            if any(entry[0] == one.name and entry[3] for entry in taken):
                one.known += 1
                if one.known == one.longest:
                    self.running.remove(one)
        return [entry for entry in taken if entry[2:] == (1, 1)] + [entry for entry in taken if entry[2:] != (1, 1)]

    def _take(self, one: Sequence, count: int, taken: list[Entry]) -> None:
        if count <= 0:
            return
        while self._missing(one, one.planned + count) > self.num_free:
            if self.running[-1] is not one:
                self._preempt(self.running[-1])
            elif count > 1:
                count //= 2
            else:
                if self.running[0] is not one:
                    self._preempt(one)
                return
        self._grow(one, count, taken)

    def _grow(self, one: Sequence, count: int, taken: list[Entry]) -> None:
        one.blocks += self._missing(one, one.planned + count)
        taken.append((one.name, one.planned, count, int(one.planned + count == one.known)))
        one.planned += count

    def _missing(self, one: Sequence, end: int) -> int:
        return max(0, -(-end // BLOCK) - one.blocks)

    def _preempt(self, one: Sequence) -> None:
        self.running.remove(one)
        one.planned = one.blocks = 0
        self.waiting.append(one)
        self.waiting.sort(key=lambda other: self.order.index(other.name))
        self.num_preemptions += 1

    def _admit(self, budget: int, taken: list[Entry]) -> None:
        while self.waiting:
            one, left = self.waiting[0], budget - sum(entry[2] for entry in taken)
            if left <= 0 or (self.running and len(self.running) >= min(self.max_num_seqs, self.max_step_tokens)):
                return
            if not self._has_room(one):
                return
            count = min(one.known, left)
            while self._missing(one, count) > self.num_free:
                if count <= 1:
                    return
                count //= 2
            self.running.append(self.waiting.pop(0))
            self.running.sort(key=lambda other: self.order.index(other.name))
            self._grow(one, count, taken)

    def _has_room(self, one: Sequence) -> bool:
        owed = sum(self._missing(other, other.known) for other in self.running if other.backlog > 1)
        if not self.running or self._missing(one, one.known) + owed + len(self.running) <= self.num_free:
            return True
        return sum(-(-(other.longest - 1) // BLOCK) for other in [*self.running, one]) <= self.num_blocks


class Pair:
    """The scheduler and the model, side by side."""

    def __init__(self, num_blocks: int, max_num_seqs: int, max_step_tokens: int) -> None:
        self.control = Control(
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_step_tokens,
            max_steps_under_way=1,
            prefix_index="none",
            max_model_len=400,
        )
        self.model = Model(num_blocks, max_num_seqs, max_step_tokens)
        self.rows: dict[int, str] = {}

    def add(self, length: int, max_tokens: int) -> None:
        name = f"r{len(self.model.order)}"
        self.control.add(name, [1] * length, max_tokens=max_tokens)
        self.model.add(name, length, max_tokens)

    def step(self) -> None:
        plan, expected = self.control.plan(), self.model.step()
        if plan is None:
            assert expected == []
            return
        for row in plan.released_rows:
            del self.rows[row]
        for start in plan.row_starts:
            assert start.row not in self.rows
            self.rows[start.row] = start.request_id
        names = [self.rows[row] for row in plan.rows]
        assert list(zip(names, plan.starts, plan.counts, plan.samples, strict=True)) == expected
        assert plan.num_decodes == sum(entry[2:] == (1, 1) for entry in expected)
        self.control.collect()
        assert [one.request_id for one in self.control.scheduler.running] == [one.name for one in self.model.running]
        assert self.control.memory.pool.num_in_use == self.model.num_blocks - self.model.num_free
        assert self.control.scheduler.num_preemptions == self.model.num_preemptions
        assert self.control.scheduler.num_waiting == len(self.model.waiting)

    def run(self) -> None:
        for _ in range(3000):
            if not self.control.scheduler.requests:
                break
            self.step()
        assert not self.model.running
        assert not self.model.waiting
        self.control.check_nothing_held()
        self.control.check_outputs()


JOBS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 3)), min_size=1, max_size=8)


@given(jobs=JOBS, max_num_seqs=st.integers(1, 5), max_step_tokens=st.integers(5, 40))
def test_with_memory_for_all_the_plans_are_those_of_the_model(
    jobs: list[tuple[int, int, int]], max_num_seqs: int, max_step_tokens: int
) -> None:
    pair = Pair(400, max_num_seqs, max_step_tokens)
    for length, max_tokens, num_steps in jobs:
        pair.add(length, max_tokens)
        for _ in range(num_steps):
            pair.step()
    pair.run()
    assert pair.model.num_preemptions == 0


@given(jobs=JOBS, num_blocks=st.integers(11, 20), max_num_seqs=st.integers(2, 5), max_step_tokens=st.integers(5, 40))
def test_in_a_tight_pool_they_are_too(
    jobs: list[tuple[int, int, int]], num_blocks: int, max_num_seqs: int, max_step_tokens: int
) -> None:
    pair = Pair(num_blocks, max_num_seqs, max_step_tokens)
    for length, max_tokens, num_steps in jobs:
        pair.add(length, max_tokens)
        for _ in range(num_steps):
            pair.step()
    pair.run()


@pytest.mark.parametrize("num_blocks", [20, 12])
def test_those_behind_yield_to_those_in_front(num_blocks: int) -> None:
    """Four prompts of a block each and 17 tokens to come: 20 blocks hold all of them, 12 do not."""
    pair = Pair(num_blocks, 4, 64)
    for _ in range(4):
        pair.add(4, 17)
    pair.run()
    assert (pair.model.num_preemptions > 0) == (num_blocks == 12)


def test_a_step_of_fewer_tokens_than_rows() -> None:
    pair = Pair(100, 5, 5)
    for length in (9, 1, 1, 1, 30):
        pair.add(length, 6)
    pair.run()
