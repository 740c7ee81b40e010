"""InputBatch: the arrays of a step are those that a slow model makes of lists, and a plan that is wrong is refused."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.worker.careful_rows import CarefulRows
from quire.compute.worker.decode_steps import DecodeSteps
from quire.compute.worker.input_batch import InputBatch
from quire.compute.worker.model_runner import StepInputs
from quire.core.errors import ExecutionError
from quire.core.grammar import Grammar
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.sampling_params import SamplingParams
from quire.core.step import NO_BLOCK, RowStart, StepPlan, TableChanges, column

SIZE, WINDOW, NUM_BLOCKS, VOCAB_SIZE = 4, 6, 500, 30
SPEC = KVCacheSpec(SIZE, 1, 8, "float32", (KVGroup((0,)), KVGroup((1,), window=WINDOW)))


def row_start(row: int, tokens: list[int], sampling: SamplingParams | None = None, num_logits: int = 0) -> RowStart:
    sampling = sampling or SamplingParams()
    return RowStart(row, f"r{row}", array("i", tokens), len(tokens), sampling, 99, num_prompt_logits=num_logits)


def make_batch() -> InputBatch:
    return InputBatch(SPEC, num_blocks=NUM_BLOCKS, vocab_size=VOCAB_SIZE)


@dataclass(slots=True)
class SlowRow:
    """A row in lists: its text, how much of it is computed, and which block holds which positions, by group."""

    text: list[int]
    num_prompt_logits: int
    blocks: list[dict[int, int]] = field(default_factory=lambda: [{} for _ in SPEC.groups])
    num_computed: int = 0
    is_failed: bool = False


@dataclass(slots=True)
class Traffic:
    """Draws plans that a scheduler could make, and keeps what they say of rows."""

    rng: random.Random
    rows: dict[int, SlowRow] = field(default_factory=dict)
    num_blocks_taken: int = 0

    def plan(self, step_id: int) -> StepPlan:
        rng = self.rng
        released = [row for row in self.rows if rng.random() < 0.15]
        for row in released:
            del self.rows[row]
        starts = []
        for row in rng.sample(range(9), 2):
            if row not in self.rows:
                tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 18))]
                num_logits = rng.choice([0, 0, len(tokens) - 1])
                self.rows[row] = SlowRow(tokens, num_logits)
                starts.append(row_start(row, tokens, num_logits=num_logits))
        rows = rng.sample(sorted(self.rows), rng.randint(1, len(self.rows)))
        columns: list[list[int]] = [[], [], [], []]
        drafts: dict[int, array[int]] = {}
        changes: list[tuple[int, int, int, int]] = []
        for row in rows:
            entry = self._entry(row, drafts)
            changes += self._table_changes(row, entry[1], entry[1] + entry[2])
            for values, value in zip(columns, entry, strict=True):
                values.append(value)
        made = [array("i", values) for values in columns]
        return StepPlan(
            step_id,
            *made,
            row_starts=tuple(starts),
            released_rows=array("i", released),
            tables=TableChanges.of(changes),
            drafts=drafts,
        )

    def _entry(self, row: int, drafts: dict[int, array[int]]) -> tuple[int, int, int, int]:
        state, rng = self.rows[row], self.rng
        start, known = state.num_computed, len(state.text)
        count = rng.choice([known - start, rng.randint(1, known - start)])
        if start + count < known:
            return row, start, count, 0
        if rng.random() < 0.3:
            drafts[row] = array("i", [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 3))])
        return row, start, count + len(drafts.get(row, ())), 1

    def _table_changes(self, row: int, start: int, stop: int) -> list[tuple[int, int, int, int]]:
        changes = []
        for number, (group, held) in enumerate(zip(SPEC.groups, self.rows[row].blocks, strict=True)):
            for index in [index for index in held if index < group.first_needed(start) // SIZE]:
                del held[index]
                changes.append((row, number, index, NO_BLOCK))
            for index in range(group.first_needed(start) // SIZE, (stop - 1) // SIZE + 1):
                if index not in held:
                    held[index] = self.num_blocks_taken % NUM_BLOCKS
                    self.num_blocks_taken += 1
                    changes.append((row, number, index, held[index]))
        return changes

    def computed(self, plan: StepPlan, batch: InputBatch) -> None:
        """A step has run: the drafts are thrown away, and each row that samples has another token."""
        for row, start, count, sample in zip(plan.rows, plan.starts, plan.counts, plan.samples, strict=True):
            state = self.rows[row]
            state.num_computed = min(start + count, len(state.text))
            if sample:
                token = self.rng.randrange(VOCAB_SIZE)
                state.text.append(token)
                self.rng.choice([batch.append, lambda row, tokens: batch.append_each([row], tokens)])(row, [token])
            if self.rng.random() < 0.05:
                state.is_failed = True
                batch.fail(row, f"row {row} broke")


def expect_arrays(inputs: StepInputs, plan: StepPlan, rows: dict[int, SlowRow], left_out: set[int]) -> None:
    """Compare the arrays of a step with those of loops over entries and positions."""
    taken = [
        entry for entry, row in enumerate(plan.rows) if row not in left_out and not rows[row].is_failed
    ]  # in the order of the plan
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[list[int]] = [[] for _ in SPEC.groups]
    query_starts, logit_starts, logit_indices = [0], [0], []
    for entry in taken:
        row, start, count = plan.rows[entry], plan.starts[entry], plan.counts[entry]
        state, drafts = rows[row], list(plan.drafts.get(row, ()))
        tokens += (state.text + drafts)[start : start + count]
        positions += range(start, start + count)
        for found, held in zip(slots, state.blocks, strict=True):
            found += [held[position // SIZE] * SIZE + position % SIZE for position in range(start, start + count)]
        wants_all = start < state.num_prompt_logits
        wanted = count if wants_all else (1 + len(drafts)) * plan.samples[entry]
        logit_indices += range(len(tokens) - wanted, len(tokens))
        query_starts.append(len(tokens))
        logit_starts.append(len(logit_indices))
    assert inputs.entries == tuple(taken)
    assert inputs.rows.tolist() == [plan.rows[entry] for entry in taken]
    assert (inputs.query_starts.tolist(), inputs.token_ids.tolist()) == (query_starts, tokens)
    assert inputs.positions.tolist() == positions
    assert [found.tolist() for found in inputs.slots] == slots
    assert (inputs.logit_starts.tolist(), inputs.logit_indices.tolist()) == (logit_starts, logit_indices)
    most = max([plan.starts[entry] + plan.counts[entry] for entry in taken], default=0)
    for number, table in enumerate(inputs.block_tables):
        for sequence, row in enumerate(inputs.rows.tolist()):
            held = {index: block for index, block in rows[row].blocks[number].items() if index * SIZE < most}
            found = {index: block for index, block in enumerate(table[sequence].tolist()) if block != NO_BLOCK}
            assert found == held, "what was released or freed behind a window is gone"


@given(st.integers(0, 1 << 40))
def test_arrays_are_those_of_a_slow_model_over_many_steps(seed: int) -> None:
    rng = random.Random(seed)
    traffic, batch = Traffic(rng), make_batch()
    for step_id in range(rng.randint(1, 12)):
        plan = traffic.plan(step_id)
        batch.apply(plan)
        left_out = {row for row in plan.rows if rng.random() < 0.1}
        expect_arrays(batch.build(plan, left_out), plan, traffic.rows, left_out)
        for entry, row in enumerate(plan.rows):
            start, stop = plan.starts[entry], plan.starts[entry] + plan.counts[entry]
            wanted = [place for place in range(start, stop) if place < traffic.rows[row].num_prompt_logits]
            assert batch.num_prompt_logits(plan, entry) == len(wanted)
            assert batch.knows(plan, entry)
            assert list(batch.tokens(row)) == list(batch.state(row).tokens) == traffic.rows[row].text
            assert batch.failure(row) == (f"row {row} broke" if traffic.rows[row].is_failed else None)
        traffic.computed(plan, batch)


# ---- a plan that is wrong ------------------------------------------------------------------------------------------


def plan_of(start: int, count: int, sample: int = 0, drafts: tuple[int, ...] = (), row: int = 0) -> StepPlan:
    given = {row: array("i", drafts)} if drafts else {}
    return StepPlan(7, column(row), column(start), column(count), column(sample), drafts=given)


def batch_of_one(num_tokens: int = 10, tables: tuple[tuple[int, ...], ...] = ((5, 6, 7), (8, 9, 10))) -> InputBatch:
    """A row 0 that knows tokens, whose groups hold these blocks from the first one on."""
    batch = make_batch()
    changes = [(0, group, index, block) for group, held in enumerate(tables) for index, block in enumerate(held)]
    batch.apply(replace(plan_of(0, 1), row_starts=(row_start(0, [3] * num_tokens),), tables=TableChanges.of(changes)))
    return batch


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (plan_of(-1, 2), "row 0 is to compute positions -1 to 0, but knows 10 tokens"),
        (plan_of(4, 0), "row 0 is to compute positions 4 to 3, but knows 10 tokens"),
        (plan_of(9, 2), "row 0 is to compute positions 9 to 10, but knows 10 tokens"),
        (plan_of(10, 1), "row 0 is to compute positions 10 to 10, but knows 10 tokens"),
        (plan_of(9, 4, 1, (1, 2)), "row 0 is to compute positions 9 to 12, but knows 12 tokens"),
        (plan_of(0, 9, 1), "row 0 is to sample after 9 of 10 tokens"),
        (plan_of(9, 2, 1, (1, 2)), "row 0 is to sample after 11 of 12 tokens"),
        (plan_of(9, 3, 0, (1, 2)), "row 0 has drafts, but does not compute and sample after them"),
        (plan_of(9, 3, 2, (1, 2)), "row 0 has drafts, but does not compute and sample after them"),
        (plan_of(10, 2, 1, (1, 2)), "row 0 has drafts, but does not compute and sample after them"),
        (plan_of(9, 2, 1, (-1,)), "row 0 has a draft that is not a token id"),
        (plan_of(9, 2, 1, (VOCAB_SIZE,)), "row 0 has a draft that is not a token id"),
        (plan_of(0, 1, row=1), "row 1 is in a plan, but no request has taken it"),
    ],
)
def test_a_plan_that_does_not_follow_from_what_is_known_fails_as_a_whole(plan: StepPlan, message: str) -> None:
    with pytest.raises(ExecutionError) as caught:
        batch_of_one().build(plan)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(0, 1),
        plan_of(9, 1),
        plan_of(9, 1, 1),
        plan_of(9, 1, 5),  # a request that opens into five
        plan_of(9, 3, 1, (0, VOCAB_SIZE - 1)),
        plan_of(0, 10, 1),
    ],
)
def test_a_plan_at_the_bounds_of_what_is_known_is_computed(plan: StepPlan) -> None:
    inputs = batch_of_one().build(plan)
    assert inputs.positions.tolist() == list(range(plan.starts[0], plan.starts[0] + plan.counts[0]))


@pytest.mark.parametrize(
    ("tables", "plan", "positions"),
    [
        (((5, 6), (8, 9, 10)), plan_of(0, 10), "0 to 9"),
        (((5, 6), (8, 9, 10)), plan_of(8, 1), "0 to 8"),
        (((5, NO_BLOCK, 7), (8, 9, 10)), plan_of(9, 1), "0 to 9"),
        (((5, 6, 7), (8, 9)), plan_of(9, 1), "4 to 9"),
        (((5, 6, 7), (8, NO_BLOCK, 10)), plan_of(9, 1), "4 to 9"),
        (((5, 6, 7), (NO_BLOCK, 9, 10)), plan_of(8, 2), "0 to 9"),
        (((5, 6, NUM_BLOCKS), (8, 9, 10)), plan_of(9, 1), "0 to 9"),
        (((5, 6, -2), (8, 9, 10)), plan_of(9, 1), "0 to 9"),
    ],
)
def test_no_position_is_read_outside_the_blocks_of_its_row(
    tables: tuple[tuple[int, ...], ...], plan: StepPlan, positions: str
) -> None:
    with pytest.raises(ExecutionError) as caught:
        batch_of_one(tables=tables).build(plan)
    assert str(caught.value) == f"the block table of row 0 does not hold positions {positions}"


def test_what_lies_behind_a_window_or_beyond_the_step_need_not_be_held() -> None:
    tables = ((0, 6, NUM_BLOCKS - 1), (NO_BLOCK, 9, 10))  # a query at 9 with a window of 6 reads back to 4
    assert batch_of_one(tables=tables).build(plan_of(9, 1)).slots[0].tolist() == [(NUM_BLOCKS - 1) * SIZE + 1]
    assert batch_of_one(tables=((5, 6), (8, 9))).build(plan_of(0, 8)).positions.tolist() == list(range(8))


def test_the_entry_that_reads_elsewhere_is_named_among_others() -> None:
    batch = batch_of_one()
    batch.apply(
        replace(
            plan_of(0, 1, row=3),
            row_starts=(row_start(3, [1, 2]), row_start(1, [4, 5])),
            tables=TableChanges.of([(3, 0, 0, 20), (3, 1, 0, 21), (1, 0, 0, 30)]),
        )
    )
    plan = StepPlan(1, column(0, 3, 1), column(9, 0, 1), column(1, 2, 1), column(1, 1, 1))
    with pytest.raises(ExecutionError, match=r"^the block table of row 1 does not hold positions 0 to 1$"):
        batch.build(plan)
    assert batch.build(plan, left_out={1}).rows.tolist() == [0, 3]


@pytest.mark.parametrize(
    ("tokens", "sampling", "says"),
    [
        ([0, VOCAB_SIZE - 1], {}, None),
        ([-1], {}, "a token is"),
        ([0, VOCAB_SIZE], {}, "a token is"),
        ([1], {"stop_token_ids": (VOCAB_SIZE,)}, "a rule is"),
        ([1], {"allowed_token_ids": (-1,)}, "a rule is"),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, "a rule is"),
        ([1], {"bad_words_ids": ((2, VOCAB_SIZE),)}, "a rule is"),
        (
            [1],
            {
                "stop_token_ids": (0, VOCAB_SIZE - 1),
                "allowed_token_ids": (0, VOCAB_SIZE - 1),
                "logit_bias": {VOCAB_SIZE - 1: 1.0},
                "bad_words_ids": ((0, VOCAB_SIZE - 1),),
            },
            None,
        ),
    ],
)
def test_a_token_that_the_model_does_not_have_fails_its_row_alone(
    tokens: list[int], sampling: dict[str, Any], says: str | None
) -> None:
    batch = make_batch()
    changes = TableChanges.of([(row, group, 0, 2 * row + group) for row in range(2) for group in range(2)])
    starts = (row_start(0, tokens, SamplingParams(**sampling)), row_start(1, [5]))
    plan = StepPlan(0, column(0, 1), column(0, 0), column(1, 1), column(0, 1), row_starts=starts, tables=changes)
    batch.apply(plan)
    expected = None if says is None else f"{says} out of range; allowed: a token id from 0 to {VOCAB_SIZE - 1}"
    assert (batch.failure(0), batch.failure(1)) == (expected, None)
    assert batch.build(plan).entries == ((0, 1) if says is None else (1,))


def test_a_row_that_is_taken_again_knows_nothing_of_who_had_it() -> None:
    batch = batch_of_one()
    batch.fail(0, "broken")
    batch.apply(replace(plan_of(0, 1), released_rows=column(0)))
    with pytest.raises(ExecutionError, match="no request has taken it"):
        batch.tokens(0)
    batch.apply(replace(plan_of(0, 1), row_starts=(row_start(0, [1, 2]),)))
    assert (list(batch.tokens(0)), batch.failure(0)) == ([1, 2], None)
    with pytest.raises(ExecutionError, match="does not hold positions 0 to 0"):
        batch.build(plan_of(0, 1))


def test_tokens_are_known_up_to_the_drafts_and_no_further() -> None:
    batch = batch_of_one()
    assert [batch.knows(plan_of(start, 2), 0) for start in (7, 8, 9, 10)] == [True, True, False, False]
    assert batch.knows(plan_of(9, 3, 1, (1, 2)), 0)
    assert not batch.knows(plan_of(9, 4, 1, (1, 2)), 0)


# ---- the short way of decodes --------------------------------------------------------------------------------------


def decodes(*rows: int, starts: tuple[int, ...] = ()) -> StepPlan:
    count = len(rows)
    return StepPlan(
        3, column(*rows), column(*(starts or (9,) * count)), column(*[1] * count), column(*[1] * count), count
    )


def short_way(batch: InputBatch, plan: StepPlan, *careful: RowStart) -> StepInputs | None:
    rows = CarefulRows()
    rows.apply(StepPlan(0, column(), column(), column(), column(), row_starts=careful))
    return DecodeSteps(rows).build(plan, batch)


def test_plain_decodes_take_the_short_way_to_the_same_arrays() -> None:
    batch = batch_of_one()
    starts = (row_start(4, [1, 2]), row_start(2, [3] * 6))
    tables = [(4, group, 0, 20 + group) for group in (0, 1)]
    tables += [(2, group, index, 30 + 2 * index + group) for group in (0, 1) for index in (0, 1)]
    batch.apply(replace(plan_of(0, 1), row_starts=starts, tables=TableChanges.of(tables)))
    ways, last = DecodeSteps(CarefulRows()), {0: 9, 4: 1, 2: 5}
    for rows in ((0,), (4, 0, 2), (2,), (0, 2), (4, 2, 0)):
        plan = decodes(*rows, starts=tuple(last[row] for row in rows))
        expect_same(ways.build(plan, batch), batch.build(plan))


def expect_same(short: StepInputs | None, long: StepInputs) -> None:
    assert short is not None
    assert short.entries == long.entries
    for name in ("query_starts", "token_ids", "positions", "logit_starts", "logit_indices", "rows"):
        assert np.array_equal(getattr(short, name), getattr(long, name)), name
    assert [each.tolist() for each in (*short.slots, *short.block_tables)] == [
        each.tolist() for each in (*long.slots, *long.block_tables)
    ]


@pytest.mark.parametrize(
    ("tables", "start"),
    [
        (((5, 6), (8, 9, 10)), 9),
        (((5, NO_BLOCK, 7), (8, 9, 10)), 9),
        (((5, 6, 7), (8, NO_BLOCK, 10)), 9),
        (((5, 6, 7), (8, 9, NUM_BLOCKS)), 9),
        (((5, 6, 7), (8, 9, 10)), 8),
        (((5, 6, 7), (8, 9, 10)), 10),
    ],
)
def test_a_decode_that_is_wrong_goes_the_long_way_which_names_the_fault(
    tables: tuple[tuple[int, ...], ...], start: int
) -> None:
    batch, plan = batch_of_one(tables=tables), decodes(0, starts=(start,))
    assert short_way(batch, plan) is None
    with pytest.raises(ExecutionError):
        batch.build(plan)


def test_the_short_way_reads_no_block_behind_a_window() -> None:
    tables = ((0, 6, NUM_BLOCKS - 1), (NO_BLOCK, 9, 10))
    assert short_way(batch_of_one(tables=tables), decodes(0)) is not None
    longer = batch_of_one(num_tokens=9, tables=tables)  # at 8 the window begins at 3, in the block that is gone
    assert short_way(longer, decodes(0, starts=(8,))) is None


def test_only_plans_of_plain_decodes_take_the_short_way() -> None:
    batch = batch_of_one()
    assert short_way(batch, replace(decodes(0), num_decodes=0)) is None
    assert short_way(batch, decodes()) is None
    assert short_way(batch, decodes(1)) is None, "a row that nobody has"
    batch.fail(0, "broken")
    assert short_way(batch, decodes(0)) is None


@pytest.mark.parametrize(
    ("sampling", "num_logits", "is_careful"),
    [
        ({}, 0, False),
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 7, "max_tokens": 3, "stop_token_ids": (3,)}, 0, False),
        ({"stop": ("a",), "ignore_eos": True, "n": 2}, 0, False),
        ({}, 1, True),
        ({"logprobs": 0}, 0, True),
        ({"repetition_penalty": 1.1}, 0, True),
        ({"presence_penalty": -0.1}, 0, True),
        ({"frequency_penalty": 0.1}, 0, True),
        ({"logit_bias": {3: 0.5}}, 0, True),
        ({"bad_words_ids": ((3,),)}, 0, True),
        ({"allowed_token_ids": (3,)}, 0, True),
        ({"min_tokens": 1}, 0, True),
        ({"grammar": Grammar.regex("a")}, 0, True),
        ({"beam_search": True, "temperature": 0.0, "n": 2}, 0, True),
    ],
)
def test_a_row_is_careful_while_it_is_held_by_who_needs_care(
    sampling: dict[str, Any], num_logits: int, is_careful: bool
) -> None:
    rows, taken = CarefulRows(), row_start(0, [1] * 10, SamplingParams(**sampling), num_logits)
    empty = StepPlan(0, column(), column(), column(), column())
    rows.apply(replace(empty, row_starts=(taken,)))
    assert rows.isdisjoint([0, 1]) is not is_careful
    assert rows.isdisjoint([1])
    assert (short_way(batch_of_one(), decodes(0), taken) is None) is is_careful
    rows.apply(replace(empty, released_rows=column(0), row_starts=(row_start(0, [1]),)))
    assert rows.isdisjoint([0])
    rows.apply(replace(empty, row_starts=(taken,)))
    rows.apply(replace(empty, released_rows=column(0)))
    assert rows.isdisjoint([0])
    rows.apply(replace(empty, row_starts=(taken,)))
    rows.apply(replace(empty, row_starts=(row_start(0, [1]),)))
    assert rows.isdisjoint([0])
