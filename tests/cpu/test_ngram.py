"""NgramProposer against a plain search through the text."""

from __future__ import annotations

import random
from array import array

import pytest

from quire.compute.speculation import NgramProposer
from quire.compute.speculation.base import Wanted
from quire.core.guesses import Guesses
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart

NOTHING = Guesses("ngram", array("i"))


def started(row: int) -> RowStart:
    return RowStart(row, f"r{row}", array("i", [1]), 1, SamplingParams(), 99)


def plain_guess(tokens: list[int], most: int) -> list[int]:
    """Look the last three tokens up, or else the last two, from the end of the text to its beginning."""
    for length in (3, 2):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:] and len(tokens) > length:
                guesses = tokens[end : end + most]
                while len(guesses) < most:
                    guesses += guesses[: most - len(guesses)]
                return guesses
    return []


@pytest.mark.parametrize("seed", range(40))
def test_guesses_are_those_of_a_plain_search(seed: int) -> None:
    """But where two grams share a hash the place of the one is lost: few of a small vocabulary do."""
    rng = random.Random(seed)
    vocab_size = rng.choice([2, 5, 40])
    proposer = NgramProposer()
    texts = {
        row: array("i", [rng.randrange(vocab_size) for _ in range(rng.choice([1, 2, 3, 50, 700]))]) for row in (0, 3)
    }
    for row in texts:
        proposer.begin(started(row))
    num_equal = num_asked = 0
    for _ in range(120):
        for row, tokens in texts.items():
            tokens.extend(rng.randrange(vocab_size) for _ in range(rng.choice([1, 1, 1, 4, 30])))
            most = rng.randrange(1, 16)
            found = proposer.propose({row: Wanted(tokens, most)}).get(row, NOTHING).tokens.tolist()
            expected = plain_guess(tokens.tolist(), most)
            num_asked += 1
            num_equal += found == expected
            assert len(found) in (0, most)
            assert set(found) <= set(tokens)
    assert num_equal >= 0.9 * num_asked


def test_a_row_that_begins_again_knows_nothing_of_its_text_before() -> None:
    proposer = NgramProposer()
    tokens = array("i", [1, 2, 3, 4, 1, 2, 3])
    proposer.begin(started(0))
    assert proposer.propose({0: Wanted(tokens, 2)}) == {0: Guesses("ngram", array("i", [4, 1]))}
    proposer.begin(started(0))
    assert proposer.propose({0: Wanted(array("i", [1, 2, 3]), 2)}) == {}
    proposer.release(0, array("i"))
    proposer.release(0, array("i"))


def test_a_text_that_repeats_itself_is_guessed_beyond_its_end() -> None:
    proposer = NgramProposer()
    proposer.begin(started(5))
    found = proposer.propose({5: Wanted(array("i", [8, 7, 8, 7, 8]), 5)})
    assert found[5].tokens.tolist() == [7, 8, 7, 8, 7]
