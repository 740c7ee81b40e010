"""BeamSearch: exact where it is wide enough to see everything, and the texts and scores of transformers."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.compute.sampling.beam_search import BeamSearch, Extension, Hypothesis, SearchRules

LogProbabilities = Callable[[tuple[int, ...]], NDArray[np.float64]]


def search(rules: SearchRules, logprobs_after: LogProbabilities) -> list[Hypothesis]:
    """Run a whole search over a function of the text so far."""
    beams, texts = BeamSearch(rules), [()]
    while not beams.is_over:
        candidates = []
        for text in texts:
            logprobs = logprobs_after(text)
            order = np.argsort(-logprobs, kind="stable")[: rules.num_candidates]
            candidates.append([(int(token), float(logprobs[token])) for token in order])
        texts = [(*texts[parent], token) for parent, token in beams.advance(candidates)]
    return beams.finished


def random_model(seed: int, vocab_size: int) -> LogProbabilities:
    def logprobs_after(text: tuple[int, ...]) -> NDArray[np.float64]:
        logits = np.random.default_rng([seed, 77, *text]).standard_normal(vocab_size) * 2
        exact: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
        return exact

    return logprobs_after


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("length_penalty", [0.0, 0.7, 1.0, 2.0])
def test_a_search_that_is_wide_enough_finds_the_best_of_all_texts(seed: int, length_penalty: float) -> None:
    vocab_size, max_length, eos = 4, 4, 3
    model = random_model(seed, vocab_size)
    rules = SearchRules(vocab_size**max_length, max_length, frozenset({eos}), length_penalty, "never")
    scores = {}
    for length in range(1, max_length + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            if eos in text[:-1] or (length < max_length and text[-1] != eos):
                continue
            total = sum(model(text[:place])[token] for place, token in enumerate(text))
            scores[text] = total / length**length_penalty
    best = sorted(scores, key=lambda text: -scores[text])[:5]
    found = search(rules, model)[:5]
    assert [each.token_ids for each in found] == best
    assert [each.score for each in found] == pytest.approx([scores[text] for text in best])


def test_a_width_of_one_is_greedy() -> None:
    model = random_model(5, 10)
    text: tuple[int, ...] = ()
    for _ in range(12):
        text = (*text, int(model(text).argmax()))
    assert search(SearchRules(1, 12), model)[0].token_ids == text


def num_steps(early_stopping: Any) -> int:
    model, lengths = random_model(2, 6), []

    def watched(text: tuple[int, ...]) -> NDArray[np.float64]:
        lengths.append(len(text))
        return model(text)

    search(SearchRules(3, 30, frozenset({0}), 1.0, early_stopping), watched)
    return max(lengths)


def test_early_stopping_ends_as_soon_as_enough_have_finished() -> None:
    assert num_steps(True) <= num_steps(False) <= num_steps("never")


@pytest.fixture(scope="module")
def theirs() -> tuple[Any, Callable[[tuple[int, ...]], NDArray[np.float64]]]:
    """A model of transformers, and the log-probabilities that it gives after a text, computed once."""
    import torch

    from support import transformers_models

    model = transformers_models.tiny_qwen3_model(tie_word_embeddings=True)

    @cache
    def logprobs_after(text: tuple[int, ...]) -> NDArray[np.float64]:
        logits = torch.tensor(transformers_models.all_logits(model, text)[-1])
        exact: NDArray[np.float64] = torch.log_softmax(logits, 0).double().numpy()
        return exact

    return model, logprobs_after


@pytest.mark.transformers
@pytest.mark.parametrize(
    ("width", "length_penalty"), [(1, 1.0), (2, -0.5), (2, 1.0), (3, 0.0), (3, 1.7), (5, -0.5), (5, 1.0)]
)
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_texts_and_scores_are_those_of_transformers(
    width: int, length_penalty: float, early_stopping: Any, theirs: tuple[Any, Any]
) -> None:
    import torch

    model, logprobs_after = theirs
    eos = [5, 17]  # of 128: some texts end early
    for prompt in ([1, 2, 3], [9, 8, 7, 6, 50], [100]):
        output = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=12,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=eos,
            pad_token_id=120,  # in no prompt, where it would be masked
            return_dict_in_generate=True,
            output_scores=True,
        )

        def after(text: Sequence[int], prompt: list[int] = prompt) -> NDArray[np.float64]:
            return logprobs_after((*prompt, *text))  # type: ignore[no-any-return]

        found = search(SearchRules(width, 12, frozenset(eos), length_penalty, early_stopping), after)
        rows = [row[len(prompt) :].tolist() for row in output.sequences]
        for ours, row in zip(found, rows, strict=True):
            assert list(ours.token_ids) == row[: len(ours.token_ids)]
            assert set(row[len(ours.token_ids) :]) <= {120}
        if width > 1:
            scores = output.sequences_scores.tolist()
            assert [each.score for each in found] == pytest.approx(scores, abs=1e-4)


def made_up(text: tuple[int, ...], seed: int) -> list[tuple[int, float]]:
    """Every token behind a text with a log-probability, the likeliest first."""
    rng = random.Random(f"{seed} {text}")
    return sorted(((token, -round(3 * rng.random(), 3)) for token in range(6)), key=lambda each: -each[1])


@pytest.mark.parametrize("early", [True, False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("seed", range(12))
def test_a_search_goes_on_as_long_as_its_rules_say_and_no_longer(
    early: bool | Literal["never"], penalty: float, seed: int
) -> None:
    width, longest, shortest, ends = 2 + seed % 2, 5, seed % 3, frozenset({0, 1})
    search = BeamSearch(SearchRules(width, longest, ends, penalty, early, shortest))
    totals: dict[tuple[int, ...], float] = {(): 0.0}  # of all texts that were ever looked at
    running: list[tuple[int, ...]] = [()]
    finished: list[tuple[int, ...]] = []

    def score(text: tuple[int, ...]) -> float:
        return totals[text] / len(text) ** penalty

    for length in range(1, longest + 1):
        candidates = [made_up(text, seed)[: search.rules.num_candidates] for text in running]
        found = []
        for text, tokens in zip(running, candidates, strict=True):
            for token, logprob in tokens:
                if token not in ends or length > shortest:
                    totals[(*text, token)] = totals[text] + logprob
                    found.append((*text, token))
        found.sort(key=lambda text: -totals[text])
        extensions = search.advance(candidates)
        ended = [text for text in found if text[-1] in ends or length == longest]
        finished += [text for text in found[:width] if text in ended]
        finished = sorted(finished, key=lambda text: -score(text))[:width]
        assert [each.token_ids for each in search.finished] == finished
        assert [each.score for each in search.finished] == pytest.approx([score(text) for text in finished])
        assert [each.cumulative_logprob for each in search.finished] == pytest.approx([totals[t] for t in finished])
        before, running = running, [text for text in found if text not in ended][:width]
        hope = -math.inf
        if running:
            to_the_end = early == "never" and penalty > 0
            hope = totals[running[0]] / (longest if to_the_end else length) ** penalty
        is_full = len(finished) == width
        assert search.is_over == (not running or (is_full and (early is True or hope <= score(finished[-1]))))
        if search.is_over:
            assert extensions == []
            return
        assert [(*before[parent], token) for parent, token in extensions] == running
    raise AssertionError("the longest text is the end of the search")


def test_an_end_that_is_not_among_the_first_ends_nothing() -> None:
    search = BeamSearch(SearchRules(width=2, max_length=9, eos_token_ids=frozenset({9})))
    assert search.advance([[(1, -0.1), (2, -0.2), (9, -0.3), (3, -0.4)]]) == [Extension(0, 1), Extension(0, 2)]
    assert search.finished == []
    extensions = search.advance([[(1, -0.1), (9, -0.2), (3, -0.9)], [(4, -0.5), (5, -9.0)]])
    assert [found.token_ids for found in search.finished] == [(1, 9)]
    assert extensions == [Extension(0, 1), Extension(1, 4)]
    assert not search.is_over


def test_a_wide_search_takes_the_best_of_its_candidates_only() -> None:
    rules, taken = SearchRules(width=64, max_length=9, eos_token_ids=frozenset({9})), []

    def candidates(first: float) -> Iterator[tuple[int, float]]:
        for token in range(rules.num_candidates):
            taken.append(token)
            yield token, first - token / 8

    search = BeamSearch(rules)
    search.advance([candidates(-1.0)])
    assert len(taken) == rules.num_candidates
    taken.clear()
    assert len(search.advance([candidates(-1.0 - text) for text in range(rules.width)])) == rules.width
    assert len(taken) <= rules.width + rules.num_candidates
