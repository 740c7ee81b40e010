"""BeamRows: whatever rows the beams stand on, their texts are those of a plain search, and few of them move."""

from __future__ import annotations

import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.sampling.beam_search import BeamSearch, Extension, SearchRules
from quire.compute.worker.beam_rows import BeamRows, _owners
from quire.core.errors import ExecutionError
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart, StepPlan, column

VOCAB_SIZE, EOS = 7, frozenset({6})
PROMPT = [1, 2]


def search_of(width: int, **wanted: object) -> SamplingParams:
    return SamplingParams(beam_search=True, temperature=0.0, best_of=width, **wanted)  # type: ignore[arg-type]


def taken(row: int, sampling: SamplingParams, name: str = "r", branch: int = 0, longest: int = 9) -> RowStart:
    return RowStart(row, name, array("i", PROMPT), len(PROMPT), sampling, longest, branch)


def plan(*starts: RowStart, released: tuple[int, ...] = ()) -> StepPlan:
    empty = column(), column(), column(), column()
    return StepPlan(0, *empty, row_starts=starts, released_rows=column(*released))


def candidates_after(text: tuple[int, ...], count: int, seed: int) -> list[tuple[int, float]]:
    """The likeliest tokens behind a text: any numbers do, if they are the same again."""
    rng = random.Random(f"{seed} {text}")
    likeliest = sorted(((token, -10 * rng.random()) for token in range(VOCAB_SIZE)), key=lambda each: -each[1])
    return likeliest[:count]


@given(st.integers(0, 1 << 40), st.integers(2, 5), st.sampled_from([True, False, "never"]), st.integers(0, 3))
def test_the_texts_of_the_rows_are_those_of_a_plain_search(seed: int, width: int, early: bool, min_tokens: int) -> None:
    rng = random.Random(seed)
    longest = rng.randint(1, 7)
    sampling = search_of(width, early_stopping=early, min_tokens=min_tokens, length_penalty=rng.choice([0.0, 1.0, -1]))
    plain = BeamSearch(SearchRules(width, longest, EOS, sampling.length_penalty, sampling.early_stopping, min_tokens))
    beams, places = BeamRows(EOS), rng.sample(range(20), width)
    beams.apply(plan(taken(places[0], sampling, longest=len(PROMPT) + longest)))
    count = beams.num_candidates("r", VOCAB_SIZE)
    texts: dict[int, tuple[int, ...]] = {places[0]: ()}  # by row
    running: list[tuple[int, ...]] = [()]  # of the plain search, best first
    while True:
        opening, moving = ([places[0]], []) if len(texts) == 1 else ([], rng.sample(sorted(texts), width))
        rows = beams.searches_in(opening, moving)["r"]
        assert [texts[row] for row in rows] == running, "the rows of the best texts first"
        candidates = [candidates_after(text, count, seed) for text in running]
        extensions = plain.advance(candidates)
        steps, found = beams.advance("r", rows, candidates)
        if plain.is_over:
            assert found == tuple(plain.finished)
            assert steps == {row: (row, []) for row in rows}
            return
        assert found == ()
        before, running = running, [(*running[parent], token) for parent, token in extensions]
        if len(texts) == 1:  # it opens: each branch takes a row
            assert steps == {places[0]: (places[0], [each.token for each in extensions])}
            texts = dict(zip(places, running, strict=True))
            beams.apply(plan(*[taken(row, sampling, branch=index) for index, row in enumerate(places)][1:]))
            continue
        old = texts
        texts = {row: (*old[step.parent], *step.token_ids) for row, step in steps.items()}
        assert sorted(texts.values()) == sorted(running)
        num_moved = sum(step.parent != row for row, step in steps.items())
        assert num_moved == width - len({text[:-1] for text in running}), "only where two go on from one"
        assert len(before) == len(running)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_each_text_has_a_place_of_its_own_and_the_best_of_a_parent_stays(parents: list[int]) -> None:
    parents = [parent % len(parents) for parent in parents]
    owners = _owners([Extension(parent, 0) for parent in parents])
    assert sorted(owners) == list(range(len(parents)))
    for index, (parent, owner) in enumerate(zip(parents, owners, strict=True)):
        assert (owner == parent) == (parent not in parents[:index])


def test_rows_are_beams_from_when_they_are_taken_until_they_are_released() -> None:
    beams = BeamRows(EOS)
    beams.apply(plan(taken(3, search_of(2)), taken(4, search_of(1)), taken(5, SamplingParams(n=3))))
    assert [row for row in range(9) if row in beams] == [3], "one beam is no search, and samples are none"
    beams.apply(plan(released=(4, 5, 8)))
    beams.apply(plan(taken(6, search_of(2), branch=1)))
    beams.apply(plan(released=(3,)))
    assert [row for row in range(9) if row in beams] == [6]
    assert beams.num_candidates("r", 100) == 4
    beams.apply(plan(released=(6,)))
    with pytest.raises(KeyError):
        beams.num_candidates("r", 100)


@pytest.mark.parametrize(
    ("width", "ends", "min_tokens", "vocab_size", "count"),
    [(2, 0, 0, 99, 4), (2, 1, 0, 99, 4), (2, 3, 0, 99, 8), (2, 3, 1, 99, 11), (4, 1, 5, 99, 9), (4, 1, 5, 8, 8)],
)
def test_a_search_sees_enough_tokens_to_go_on_whatever_ends(
    width: int, ends: int, min_tokens: int, vocab_size: int, count: int
) -> None:
    beams = BeamRows(frozenset(range(ends)))
    beams.apply(plan(taken(0, search_of(width, min_tokens=min_tokens))))
    assert beams.num_candidates("r", vocab_size) == count


def test_a_search_of_which_a_row_is_missing_is_left_out_and_the_others_go_on() -> None:
    beams = BeamRows(EOS)
    for first, name in ((0, "a"), (4, "b")):
        beams.apply(plan(taken(first, search_of(2), name)))
        assert beams.searches_in([first], []) == {name: [first]}
        beams.advance(name, [first], [[(1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0)]])
        beams.apply(plan(taken(first + 1, search_of(2), name, branch=1)))
    assert beams.searches_in([], [0, 4, 5]) == {"b": [4, 5]}
    assert beams.searches_in([], [5, 1, 0, 4]) == {"b": [4, 5], "a": [0, 1]}


def test_beams_that_move_before_they_have_opened_are_refused() -> None:
    beams = BeamRows(EOS)
    beams.apply(plan(taken(0, search_of(2)), taken(1, search_of(2), branch=1)))
    with pytest.raises(ExecutionError, match=r"^the beams of request 'r' move before they have opened$"):
        beams.advance("r", [0, 1], [[(1, -0.5)], [(2, -0.5)]])


def test_a_search_that_opens_again_begins_anew() -> None:
    """After a preemption the prompt opens once more, and the search finds the same again."""
    beams, first = BeamRows(EOS), [(1, -0.5), (2, -1.0), (3, -2.0), (4, -3.0)]
    beams.apply(plan(taken(0, search_of(2))))
    steps = beams.advance("r", [0], [first])
    beams.apply(plan(taken(1, search_of(2), branch=1)))
    beams.advance("r", [0, 1], [first, first])
    beams.apply(plan(released=(0, 1)))
    beams.apply(plan(taken(7, search_of(2))))
    again = beams.advance("r", [7], [first])
    assert [step.token_ids for step in again[0].values()] == [step.token_ids for step in steps[0].values()] == [[1, 2]]
