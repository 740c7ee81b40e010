"""Proposers beside n-grams: earlier answers of the same scope, what is forced, and several in turn."""

from __future__ import annotations

import random
from array import array

import pytest

from quire.compute.speculation import BestFirst, ForcedProposer, NgramProposer, SuffixProposer, create_proposer
from quire.compute.speculation.base import Wanted
from quire.compute.speculation.suffix import LENGTH, MOST_SCOPES, MOST_TOKENS
from quire.core.guesses import Guesses
from quire.core.request import DEFAULT_SCOPE, CacheScope
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart

PROMPT = array("i", [90, 91, 92])


def started(row: int, scope: CacheScope = DEFAULT_SCOPE) -> RowStart:
    return RowStart(row, f"r{row}", PROMPT, len(PROMPT), SamplingParams(), 999, scope=scope)


def guess(proposer: SuffixProposer, text: list[int], *, scope: CacheScope = DEFAULT_SCOPE, most: int = 4) -> list[int]:
    """Return the guesses of a row that has this answer so far; nothing is kept of it."""
    proposer.begin(started(0, scope))
    found = proposer.propose({0: Wanted(PROMPT + array("i", text), most)})
    proposer.release(0, PROMPT)
    return found[0].tokens.tolist() if found else []


def answer(proposer: SuffixProposer, text: list[int], scope: CacheScope = DEFAULT_SCOPE) -> None:
    proposer.begin(started(1, scope))
    proposer.release(1, PROMPT + array("i", text))


def test_an_answer_is_found_after_it_has_ended_and_not_before() -> None:
    proposer = SuffixProposer()
    proposer.begin(started(1))
    proposer.propose({1: Wanted(PROMPT + array("i", range(1, 9)), 4)})
    assert guess(proposer, [1, 2, 3, 4]) == []
    proposer.release(1, PROMPT + array("i", range(1, 9)))
    assert guess(proposer, [1, 2, 3, 4]) == [5, 6, 7, 8]
    assert guess(proposer, [1, 2, 3, 4], most=2) == [5, 6]
    assert guess(proposer, [50, 2, 3, 4]) == []
    assert guess(proposer, [5, 6, 7, 8]) == []  # nothing follows


def test_prompts_are_not_kept_and_no_guess_goes_on_into_another_answer() -> None:
    proposer = SuffixProposer()
    answer(proposer, [1, 2, 3, 4, 5])
    answer(proposer, [6, 7, 8, 9, 10])
    assert guess(proposer, [1, 2, 3, 4]) == [5]
    assert guess(proposer, [90, 91, 92, 1]) == []
    assert guess(proposer, [4, 5, 6, 7]) == []


def test_the_last_answer_counts() -> None:
    proposer = SuffixProposer()
    answer(proposer, [1, 2, 3, 4, 5])
    answer(proposer, [1, 2, 3, 4, 6])
    assert guess(proposer, [1, 2, 3, 4]) == [6]


@pytest.mark.parametrize(
    "other", [CacheScope("ada"), CacheScope(salt="s"), CacheScope("ada", "s"), CacheScope(extra_keys=("s",))]
)
def test_answers_of_another_scope_are_never_found(other: CacheScope) -> None:
    proposer = SuffixProposer()
    answer(proposer, [1, 2, 3, 4, 5], other)
    assert guess(proposer, [1, 2, 3, 4]) == []
    assert guess(proposer, [1, 2, 3, 4], scope=CacheScope("bob")) == []
    assert guess(proposer, [1, 2, 3, 4], scope=other) == [5]


def test_what_is_kept_is_bounded() -> None:
    proposer = SuffixProposer()
    rng = random.Random(0)
    for number in range(3 * MOST_SCOPES):
        answer(proposer, [1, 2, 3, 4, 5], CacheScope(f"{number}"))
    assert len(proposer._scopes) == MOST_SCOPES
    for _ in range(30):
        answer(proposer, [rng.randrange(1000) for _ in range(10_000)])
        assert len(proposer._scopes[DEFAULT_SCOPE]._tokens) <= MOST_TOKENS + 1
    answer(proposer, [1, 2, 3, 4, 5])
    assert guess(proposer, [1, 2, 3, 4]) == [5]


@pytest.mark.parametrize("seed", range(10))
def test_guesses_are_those_of_a_plain_search(seed: int) -> None:
    """But where two grams share a hash the place of the one is lost: few of a small vocabulary do."""
    rng = random.Random(seed)
    proposer, answers = SuffixProposer(), list[list[int]]()
    num_equal = num_asked = 0
    for _ in range(40):
        new = [rng.randrange(4) for _ in range(rng.randrange(1, 40))]
        answer(proposer, new)
        if len(new) > LENGTH:
            answers.append(new)
        text = [rng.randrange(4) for _ in range(rng.randrange(LENGTH, 9))]
        expected = next(
            (
                each[end : end + 4]
                for each in reversed(answers)
                for end in range(len(each), LENGTH - 1, -1)
                if each[end - LENGTH : end] == text[-LENGTH:]
            ),
            [],
        )
        num_asked += 1
        num_equal += guess(proposer, text) == expected
    assert num_equal >= 0.8 * num_asked


def test_the_first_proposer_that_has_a_guess_makes_it() -> None:
    proposer = BestFirst([ForcedProposer(), NgramProposer()])
    for row in (0, 1, 2):
        proposer.begin(started(row))
    again = array("i", [1, 2, 3, 4, 1, 2, 3])
    rows = {0: Wanted(again, 2, (8, 9, 10)), 1: Wanted(again, 2), 2: Wanted(array("i", [1, 2, 3]), 2)}
    assert proposer.propose(rows) == {
        0: Guesses("forced", array("i", [8, 9])),
        1: Guesses("ngram", array("i", [4, 1])),
    }
    for row in (0, 1, 2):
        proposer.release(row, again)


def test_the_setting_says_who_guesses() -> None:
    assert create_proposer("off") is None
    assert isinstance(create_proposer("ngram"), NgramProposer)
    assert isinstance(create_proposer("auto"), BestFirst)
