"""Steps ahead: a launched step completes the texts of its own rows, late, and whatever has happened to them since."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from quire.compute.arrays import BoolArray
from quire.compute.sampling.draws import Draws
from quire.compute.worker.careful_rows import CarefulRows
from quire.compute.worker.image_queue import EncodedImages
from quire.compute.worker.image_rows import ImageRows
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.model_runner import UNKNOWN, StepInputs
from quire.compute.worker.sampling_columns import SamplingColumns
from quire.compute.worker.step_ahead import Drawn, Launched, StepsAhead, broken
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart, StepPlan, TableChanges, column

SPEC = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))


@dataclass(slots=True)
class Step:
    """A step whose results are made up."""

    drawn: Drawn
    num_waits: int = 0

    def wait(self) -> Drawn:
        self.num_waits += 1
        return self.drawn


@dataclass(slots=True)
class Launcher:
    """Notes what is launched; the tokens come from a list, and what is broken is told by place."""

    tokens: deque[int] = field(default_factory=deque)
    broken_tokens: set[int] = field(default_factory=set)
    broken_logits: set[int] = field(default_factory=set)
    launched: list[tuple[StepInputs, Draws]] = field(default_factory=list)
    is_prepared: bool = False

    def prepare(self, cache: object) -> None:
        self.is_prepared = True

    def launch(self, inputs: StepInputs, draws: Draws, cache: object) -> Step:
        self.launched.append((inputs, draws))
        tokens = np.array([self.tokens.popleft() for _ in range(len(draws))], np.int64)
        finite = np.array([place not in self.broken_tokens for place in range(len(inputs.token_ids))])
        finite_logits = np.array([place not in self.broken_logits for place in range(len(inputs.logit_indices))], bool)
        return Step(Drawn(tokens, finite, finite_logits))


class Rows:
    """A batch, its columns and the steps ahead, wired as a worker wires them."""

    def __init__(self) -> None:
        self.batch = InputBatch(SPEC, num_blocks=50, vocab_size=100)
        self.columns, self.careful, self.launcher = SamplingColumns(), CarefulRows(), Launcher()
        self.ahead = StepsAhead(self.launcher, self.columns, self.careful, ImageRows(None, EncodedImages(0)))

    def take(self, row: int, tokens: list[int], **wanted: Any) -> None:
        start = RowStart(row, f"r{row}", array("i", tokens), len(tokens), SamplingParams(seed=row, **wanted), 99)
        changes = TableChanges.of([(row, 0, index, 3 * row + index) for index in range(3)])
        plan = replace(plan_of(), row_starts=(start,), tables=changes)
        self.batch.apply(plan)
        self.careful.apply(plan)
        self.columns.start(start)

    def launch(self, plan: StepPlan, *tokens: int) -> Launched:
        self.launcher.tokens += tokens
        return self.ahead.launch(plan, self.batch, None)  # type: ignore[arg-type]

    def text(self, row: int) -> list[int]:
        return list(self.batch.tokens(row))


def plan_of(*entries: tuple[int, int, int, int], step_id: int = 0, **rest: Any) -> StepPlan:
    """Entries: row, start, count, samples."""
    columns = [array("i", values) for values in zip(*entries, strict=True)] or [column() for _ in range(4)]
    return StepPlan(step_id, *columns, **rest)  # type: ignore[misc]


def test_a_token_is_unknown_until_the_result_is_collected() -> None:
    rows = Rows()
    rows.take(0, [5, 6])
    rows.take(2, [7, 8, 9])
    first = rows.launch(plan_of((2, 0, 3, 1), (0, 0, 1, 0), step_id=4), 31)
    assert (rows.text(2), rows.text(0)) == ([7, 8, 9, UNKNOWN], [5, 6])
    second = rows.launch(plan_of((2, 3, 1, 1), (0, 1, 1, 1), step_id=5), 32, 21)
    assert (rows.text(2), rows.text(0)) == ([7, 8, 9, UNKNOWN, UNKNOWN], [5, 6, UNKNOWN])
    assert rows.launcher.launched[1][0].token_ids.tolist() == [UNKNOWN, 6], "the runner knows what it drew"
    result = first.result()
    assert (result.step_id, result.num_tokens.tolist(), result.tokens.tolist()) == (4, [1, 0], [31])
    assert rows.text(2) == [7, 8, 9, 31, UNKNOWN]
    result = second.result()
    assert (result.num_tokens.tolist(), result.tokens.tolist(), result.failures) == ([1, 1], [32, 21], {})
    assert (rows.text(2), rows.text(0)) == ([7, 8, 9, 31, 32], [5, 6, 21])


def test_each_draw_has_the_place_and_the_seed_of_its_row() -> None:
    rows = Rows()
    for row, length in ((3, 2), (0, 4), (1, 3)):
        rows.take(row, [9] * length, temperature=0.5 + row)
    rows.launch(plan_of((3, 0, 2, 1), (0, 1, 2, 0), (1, 2, 1, 1)), 8, 8)
    inputs, draws = rows.launcher.launched[0]
    assert inputs.logit_indices.tolist() == [1, 4]
    assert (draws.logit_rows.tolist(), draws.positions.tolist(), draws.seeds.tolist()) == ([0, 1], [2, 3], [3, 1])
    assert draws.parameter("temperature").tolist() == [3.5, 1.5]
    assert draws.num_logprobs.tolist() == [-1, -1]


def test_rules_of_a_draw_have_counts_only_where_its_text_is_known() -> None:
    rows = Rows()
    rows.take(0, [5, 6, 5], repetition_penalty=1.5, min_tokens=2, stop_token_ids=(8,))
    first = rows.launch(plan_of((0, 0, 3, 1)), 6)
    second = rows.launch(plan_of((0, 3, 1, 1)), 7)
    first.result()
    third = rows.launch(plan_of((0, 4, 1, 1)), 7)
    for launched in (second, third):
        launched.result()
    rows.launch(plan_of((0, 5, 1, 1)), 1)
    rules = [draws.rules for _, draws in rows.launcher.launched]
    assert [each.seen.ids.tolist() for each in rules] == [[5, 6], [], [], [5, 6, 7]]
    assert [each.counts.tolist() for each in rules] == [[0, 0], [], [], [0, 1, 2]]
    assert [each.banned.ids.tolist() for each in rules] == [[8], [8], [], []]


def test_a_result_belongs_to_who_had_the_row_when_it_was_launched() -> None:
    rows = Rows()
    rows.take(0, [5])
    launched, old = rows.launch(plan_of((0, 0, 1, 1)), 41), rows.batch.state(0)
    rows.batch.apply(plan_of(released_rows=column(0)))
    rows.take(0, [6, 7])
    assert launched.result().tokens.tolist() == [41]
    assert (list(old.tokens), rows.text(0)) == ([5, 41], [6, 7])


@pytest.mark.parametrize(
    ("place", "message"),
    [("broken_tokens", "the model's output is not finite"), ("broken_logits", "the logits are not finite")],
)
def test_a_row_whose_numbers_are_not_finite_fails_alone_and_late(place: str, message: str) -> None:
    rows = Rows()
    rows.take(0, [5])
    rows.take(1, [6])
    getattr(rows.launcher, place).add(1)
    first = rows.launch(plan_of((0, 0, 1, 1), (1, 0, 1, 1)), 11, 12)
    getattr(rows.launcher, place).clear()
    second = rows.launch(plan_of((1, 1, 1, 1), (0, 1, 1, 1)), 22, 21)
    result = first.result()
    assert (result.num_tokens.tolist(), result.tokens.tolist(), result.failures) == ([1, 0], [11], {1: message})
    result = second.result()
    assert (result.num_tokens.tolist(), result.tokens.tolist(), result.failures) == ([0, 1], [21], {1: message})
    assert rows.batch.failure(1) == message
    third = rows.launch(plan_of((1, 2, 1, 1), (0, 2, 1, 1)), 31)
    assert third.result().tokens.tolist() == [31], "a row that has failed is not computed again"
    assert [inputs.rows.tolist() for inputs, _ in rows.launcher.launched] == [[0, 1], [1, 0], [0]]


def test_a_step_in_which_every_row_has_failed_is_not_launched() -> None:
    rows = Rows()
    rows.take(0, [5])
    rows.batch.fail(0, "it broke")
    result = rows.launch(plan_of((0, 0, 1, 1))).result()
    assert (result.num_tokens.tolist(), result.tokens.tolist(), result.failures) == ([0], [], {0: "it broke"})
    assert (rows.launcher.launched, rows.text(0)) == ([], [5])


def test_only_plain_steps_are_taken() -> None:
    rows = Rows()
    rows.take(0, [5])
    rows.take(1, [5], logprobs=1)
    assert rows.ahead.takes(plan_of((0, 0, 1, 1)))
    assert rows.ahead.takes(plan_of((0, 0, 1, 0)))
    assert rows.ahead.takes(plan_of()), "a plan that moves blocks only"
    assert not rows.ahead.takes(plan_of((0, 0, 1, 2)))
    assert not rows.ahead.takes(plan_of((0, 0, 1, 0), (1, 0, 1, 0)))
    assert not rows.ahead.takes(plan_of((0, 0, 2, 1), drafts={0: column(3)}))


def test_the_launcher_is_prepared_when_it_is_told_to() -> None:
    rows = Rows()
    assert not rows.launcher.is_prepared
    rows.ahead.prepare(None)  # type: ignore[arg-type]
    assert rows.launcher.is_prepared


def flags(*values: int) -> BoolArray:
    return np.array(values, bool)


@pytest.mark.parametrize(
    ("finite", "finite_logits", "found"),
    [
        (flags(1, 1, 1, 1), flags(1, 1), []),
        (flags(0, 1, 1, 1), flags(1, 1), [(0, "the model's output is not finite")]),
        (flags(1, 0, 1, 1), flags(1, 1), [(0, "the model's output is not finite")]),
        (flags(1, 1, 0, 1), flags(1, 1), [(1, "the model's output is not finite")]),
        (flags(1, 1, 1, 0), flags(1, 0), [(2, "the model's output is not finite")]),
        (flags(1, 1, 1, 1), flags(0, 1), [(0, "the logits are not finite")]),
        (flags(1, 1, 1, 1), flags(1, 0), [(2, "the logits are not finite")]),
        (
            flags(0, 1, 0, 1),
            flags(1, 0),
            [
                (0, "the model's output is not finite"),
                (1, "the model's output is not finite"),
                (2, "the logits are not finite"),
            ],
        ),
    ],
)
def test_what_is_broken_is_told_by_entry(
    finite: BoolArray, finite_logits: BoolArray, found: list[tuple[int, str]]
) -> None:
    rows = Rows()
    for row, tokens in ((0, [1, 2]), (1, [3, 4]), (2, [5])):
        rows.take(row, tokens)
    inputs = rows.batch.build(plan_of((0, 0, 2, 1), (1, 0, 1, 0), (2, 0, 1, 1)))
    assert list(broken(inputs, finite, finite_logits)) == found
