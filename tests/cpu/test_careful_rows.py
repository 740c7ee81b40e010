"""CarefulRows against a plain account of who holds which row."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.worker.careful_rows import CarefulRows
from quire.core.grammar import Grammar
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart, StepPlan, column

PLAIN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"top_k": 5, "min_p": 0.1},
    {"max_tokens": 3},
    {"n": 3},
    {"seed": 7},
    {"penalty_window": 9},
]
CAREFUL: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"logprobs": 5},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": (1, 2)},
    {"min_tokens": 2},
    {"grammar": Grammar.regex("a+")},
    {"n": 2, "beam_search": True, "temperature": 0.0},
]


def start(row: int, settings: dict[str, Any], num_prompt_logits: int = 0) -> RowStart:
    return RowStart(
        row=row,
        request_id=f"r{row}",
        branch=0,
        tokens=array("i", [1, 2, 3]),
        num_prompt_tokens=3,
        num_prompt_logits=num_prompt_logits,
        max_total_tokens=9,
        sampling=SamplingParams(**settings),
    )


def plan(starts: list[RowStart], released: list[int]) -> StepPlan:
    empty = column()
    return StepPlan(0, empty, empty, empty, empty, row_starts=tuple(starts), released_rows=column(*released))


@pytest.mark.parametrize("settings", PLAIN + CAREFUL, ids=str)
def test_a_row_is_careful_for_what_its_draw_depends_on_or_what_it_reports(settings: dict[str, Any]) -> None:
    rows = CarefulRows()
    rows.apply(plan([start(4, settings)], []))
    assert rows.isdisjoint([4]) == (settings in PLAIN)
    assert rows.isdisjoint([3, 5])


AHEAD: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.1},
    {"logit_bias": {3: 1.0}},
    {"allowed_token_ids": (1, 2)},
    {"bad_words_ids": ((3,),)},
    {"min_tokens": 2},
]


WAITS: list[dict[str, Any]] = [
    {"bad_words_ids": ((3,), (1, 2))},
    {"presence_penalty": 0.5, "penalty_window": 9},
]


@pytest.mark.parametrize("settings", [*PLAIN, *CAREFUL, *AHEAD, *WAITS], ids=str)
def test_steps_ahead_apply_rules_that_need_no_known_token(settings: dict[str, Any]) -> None:
    rows = CarefulRows(is_ahead=True)
    rows.apply(plan([start(4, settings)], []))
    assert rows.isdisjoint([4]) == (settings in PLAIN + AHEAD)


def test_logits_of_the_prompt_make_a_row_careful() -> None:
    rows = CarefulRows()
    rows.apply(plan([start(1, {}, num_prompt_logits=2)], []))
    assert not rows.isdisjoint([0, 1])


@given(
    steps=st.lists(
        st.tuples(
            st.sets(st.integers(0, 5)),
            st.dictionaries(st.integers(0, 5), st.booleans(), max_size=4),
        ),
        max_size=12,
    )
)
def test_rows_are_careful_as_their_last_request_is_until_it_leaves(
    steps: list[tuple[set[int], dict[int, bool]]],
) -> None:
    rows, careful = CarefulRows(), set[int]()
    for released, taken in steps:
        careful -= released
        careful = {row for row in careful if row not in taken} | {
            row for row, is_careful in taken.items() if is_careful
        }
        starts = [start(row, CAREFUL[row] if is_careful else PLAIN[row]) for row, is_careful in taken.items()]
        rows.apply(plan(starts, sorted(released)))
        for row in range(6):
            assert rows.isdisjoint([row]) == (row not in careful)
        assert rows.isdisjoint(range(6)) == (not careful)
        assert rows.isdisjoint([])
