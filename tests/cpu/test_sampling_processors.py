"""Rules and filters against the logits processors of transformers, and against vLLM's definition of its penalties."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.sampling.draws import Draws
from quire.compute.sampling.native import NativeSampler
from quire.compute.sampling.reference import ReferenceSampler, changed, token_weights
from quire.compute.worker.sampling_columns import Sampling, SamplingColumns
from quire.core.sampling_params import SamplingParams
from quire.core.step import RowStart

VOCAB, EOS = 64, 63
Logits = NDArray[np.float32]


def draw_of(tokens: list[int], num_prompt: int, **wanted: Any) -> Draws:
    """Return the draw of a row that knows these tokens."""
    columns = SamplingColumns(frozenset({EOS}))
    columns.start(RowStart(0, "r", array("i", tokens), num_prompt, SamplingParams(**wanted), 99))
    zero = np.zeros(1, np.int64)
    return columns.draws(Sampling(zero, zero, zero + len(tokens), zero + 1, zero, [array("i", tokens)], [()]))


def texts(count: int) -> list[tuple[list[int], int, Logits]]:
    """Return texts full of repetitions, the lengths of their prompts, and logits of both signs and of none."""
    chance = random.Random(11)
    found = []
    for _ in range(count):
        tokens = [chance.randrange(chance.choice([8, VOCAB])) for _ in range(chance.randrange(2, 30))]
        logits = np.array([chance.gauss(0, 3) for _ in range(VOCAB)], np.float32)
        logits[chance.randrange(VOCAB)] = 0.0
        found.append((tokens, chance.randrange(1, len(tokens)), logits))
    return found


def vllm_penalties(
    tokens: list[int], num_prompt: int, logits: Logits, repetition: float, presence: float, frequency: float
) -> Logits:
    """Return what vLLM's `apply_penalties` gives: the definition that its documents and OpenAI's state."""
    in_prompt = np.bincount(tokens[:num_prompt], minlength=VOCAB) > 0
    counts = np.bincount(tokens[num_prompt:], minlength=VOCAB).astype(np.float32)
    penalties = np.where(in_prompt | (counts > 0), np.float32(repetition), np.float32(1))
    logits = np.where(logits > 0, logits / penalties, logits * penalties).astype(np.float32)
    logits = logits - np.float32(frequency) * counts
    penalized: Logits = logits - np.float32(presence) * (counts > 0).astype(np.float32)
    return penalized


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"),
    [(1.0, 1.5, 0.0), (1.0, 0.0, 0.8), (1.0, -2.0, -0.3), (1.3, 0.5, 0.25), (0.7, 0.0, 0.0)],
)
def test_penalties_are_those_of_vllm_to_the_bit(repetition: float, presence: float, frequency: float) -> None:
    for tokens, num_prompt, logits in texts(200):
        draw = draw_of(
            tokens,
            num_prompt,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
        expected = vllm_penalties(tokens, num_prompt, logits, repetition, presence, frequency)
        assert np.array_equal(changed(logits, draw, 0), expected)


def test_top_k_1_is_greedy_at_any_temperature() -> None:
    """At the highest temperature the weights of all tokens are rounded to one number, and the lowest id won."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 40] = 0.01
    draw = draw_of([3, 4, 5], 2, top_k=1, temperature=1e6, seed=7)
    native = NativeSampler(_native.kernels("portable"), _native.ThreadTeam(1), VOCAB)
    for sampler in (ReferenceSampler(), native):
        assert sampler.sample(logits, draw).tokens.tolist() == [40]


def test_rules_come_in_the_order_of_vllm() -> None:
    """Allowed ids and bans, then biases, then penalties, and only then temperature and filters."""
    for tokens, num_prompt, logits in texts(100):
        allowed = sorted(set(range(0, VOCAB, 2)) | set(tokens))
        rules: dict[str, Any] = {"allowed_token_ids": allowed, "bad_words_ids": [[4], [tokens[-1], 8]]}
        biases = {10: -2.0} | {tokens[0]: 3.0}
        rules |= {"logit_bias": biases, "repetition_penalty": 1.6, "presence_penalty": 0.4}
        expected = np.full(VOCAB, -np.inf, np.float32)
        expected[allowed] = logits[allowed]
        expected[[4, 8]] = -np.inf
        for token, bias in biases.items():
            expected[token] += np.float32(bias)
        expected = vllm_penalties(tokens, num_prompt, expected, 1.6, 0.4, 0.0)
        assert np.array_equal(changed(logits, draw_of(tokens, num_prompt, **rules), 0), expected)


# ---- transformers -------------------------------------------------------------------------------------------------

PROCESSORS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "repetition": ({"repetition_penalty": 1.7}, lambda t: t.RepetitionPenaltyLogitsProcessor(1.7)),
    "repetition_below_one": ({"repetition_penalty": 0.4}, lambda t: t.RepetitionPenaltyLogitsProcessor(0.4)),
    "bad_words": (
        {"bad_words_ids": [[3], [1, 2], [5, 1, 4], [0, 0], [7, 6, 5]]},
        lambda t: t.NoBadWordsLogitsProcessor([[3], [1, 2], [5, 1, 4], [0, 0], [7, 6, 5]], eos_token_id=EOS),
    ),
    "bias": (
        {"logit_bias": {5: 3.5, 6: -100, 40: 0.25}},
        lambda t: t.SequenceBiasLogitsProcessor([[[5], 3.5], [[6], -100.0], [[40], 0.25]]),
    ),
    "allowed": (
        {"allowed_token_ids": [1, 5, 40]},
        lambda t: t.PrefixConstrainedLogitsProcessor(lambda *_: [1, 5, 40], num_beams=1),
    ),
    "temperature": ({"temperature": 0.7}, lambda t: t.TemperatureLogitsWarper(0.7)),
    "top_k": ({"top_k": 9}, lambda t: t.TopKLogitsWarper(9)),
    "top_p": ({"top_p": 0.8}, lambda t: t.TopPLogitsWarper(0.8)),
    "top_p_of_little": ({"top_p": 0.01}, lambda t: t.TopPLogitsWarper(0.01)),
    "min_p": ({"min_p": 0.05}, lambda t: t.MinPLogitsWarper(0.05)),
}


def assert_as_processed(names: list[str]) -> None:
    import torch
    import transformers

    wanted: dict[str, Any] = {}
    for name in names:
        wanted |= PROCESSORS[name][0]
    processors = [PROCESSORS[name][1](transformers) for name in names]
    for tokens, num_prompt, logits in texts(200):
        scores = torch.tensor(logits[None])
        for processor in processors:
            scores = processor(torch.tensor([tokens]), scores)
        expected = torch.softmax(scores.double(), dim=-1).numpy()[0]
        draw = draw_of(tokens, num_prompt, **wanted)
        weights = token_weights(changed(logits, draw, 0), draw, 0)
        assert weights is not None
        np.testing.assert_allclose(weights / weights.sum(), expected, rtol=2e-5, atol=1e-12)


@pytest.mark.transformers
@pytest.mark.parametrize("name", PROCESSORS)
def test_each_is_the_processor_of_transformers(name: str) -> None:
    assert_as_processed([name])


@pytest.mark.transformers
@pytest.mark.parametrize(
    "names",
    [
        ["bad_words", "bias", "repetition", "temperature"],
        ["allowed", "bias", "repetition", "temperature", "min_p"],
        ["bias", "repetition", "temperature", "top_k", "top_p"],
        ["bad_words", "repetition_below_one", "temperature", "min_p", "top_k", "top_p"],
    ],
)
def test_in_our_order_they_are_the_processors_of_transformers_in_that_order(names: list[str]) -> None:
    assert_as_processed(names)
