"""ReferenceSampler: the definition in `draws` as readable code. Tests compare the native sampler with it."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.sampling.draws import Choices, Draws
from quire.compute.sampling.token_numbers import draw_keys, token_numbers

Weights = NDArray[np.float64]

STEPS: Final = float(1 << 20)
"""From the highest logit to the lowest: the sum of the squares of 2^23 tokens still fits into an int64."""


class ReferenceSampler:
    """Chooses tokens one draw at a time, among the first `vocab_size` or all; implements `Sampler`. Immutable."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: FloatArray, draws: Draws) -> Choices:
        """Return a choice per draw. Does not mutate the logits."""
        choices = Choices.of(np.zeros(len(draws), np.int64), draws.num_logprobs)
        for index in range(len(draws)):
            row = logits[draws.logit_rows[index]][: self._vocab_size]
            choices.tokens[index] = _choose(changed(row, draws, index), draws, index)
            if draws.num_logprobs[index] >= 0:
                _report(row, int(draws.num_logprobs[index]), index, choices)
        return choices

    def report(self, logits: FloatArray, logit_rows: IntArray, tokens: IntArray, num_logprobs: IntArray) -> Choices:
        """Return the log-probabilities of given tokens. Does not mutate."""
        choices = Choices.of(tokens, num_logprobs)
        for index, row in enumerate(logit_rows):
            _report(logits[row], int(num_logprobs[index]), index, choices)
        return choices


def changed(row: FloatArray, draws: Draws, index: int) -> FloatArray:
    """Return the logits of a draw after its rules. Does not mutate."""
    logits, rules = row.copy(), draws.rules
    allowed, seen = rules.allowed.ids[rules.allowed.span(index)], rules.seen.ids[rules.seen.span(index)]
    if len(allowed):
        logits[:] = -np.inf
        logits[allowed] = row[allowed]
    mask = rules.masks.allowed(index, len(logits))
    if mask is not None:
        logits[~mask] = -np.inf
    logits[rules.banned.ids[rules.banned.span(index)]] = -np.inf
    logits[rules.biased.ids[rules.biased.span(index)]] += rules.biases[rules.biased.span(index)]
    penalty, counts = draws.parameter("repetition_penalty")[index], rules.counts[rules.seen.span(index)]
    logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
    logits[seen] -= draws.parameter("frequency_penalty")[index] * counts.astype(np.float32)
    logits[seen[counts > 0]] -= draws.parameter("presence_penalty")[index]
    return logits


def _choose(row: FloatArray, draws: Draws, index: int) -> int:
    weights = token_weights(row, draws, index)
    if weights is None:
        return int(np.argmax(row))
    kept = np.flatnonzero(weights)
    (key,) = draw_keys(draws.seeds[[index]], draws.positions[[index]])
    with np.errstate(over="ignore"):
        times = -np.log(token_numbers(key, kept)) / weights[kept]
    return int(kept[times.argmin()])


def token_weights(row: FloatArray, draws: Draws, index: int) -> Weights | None:
    """Return the weight of every token, 0 if a filter removed it; None for a greedy draw."""
    temperature, top_p = (float(draws.parameter(name)[index]) for name in ("temperature", "top_p"))
    top_k = int(draws.parameter("top_k")[index])
    highest = row.max()
    if temperature < np.finfo(np.float32).tiny or not np.isfinite(highest):
        return None
    weights: Weights = np.exp((row.astype(np.float64) - highest) / temperature)
    weights[row.astype(np.float64) < least_logit(row, float(draws.parameter("top_n_sigma")[index]))] = 0.0
    weights[weights < draws.parameter("min_p")[index]] = 0.0
    order = np.argsort(-weights, kind="stable")
    if top_k > 0:
        weights[order[top_k:]] = 0.0
    if top_p < 1.0:
        sums = np.cumsum(weights[order])
        kept = 1 + int(np.searchsorted(sums, top_p * sums[-1], side="left"))
        weights[order[kept:]] = 0.0
    return weights


def least_logit(row: FloatArray, num_deviations: float) -> float:
    """Return the least logit that top_n_sigma keeps. Does not mutate."""
    logits = row[np.isfinite(row)].astype(np.float64)
    highest, spread = logits.max(), logits.max() - logits.min()
    if num_deviations <= 0 or spread == 0:
        return -math.inf
    steps = ((highest - logits) * (STEPS / spread) + 0.5).astype(np.int64)
    mean = float(steps.sum()) / len(steps)
    variance = max(0.0, float((steps * steps).sum()) / len(steps) - mean * mean)
    return float(highest - num_deviations * (math.sqrt(variance) * (spread / STEPS)))


def _report(row: FloatArray, count: int, index: int, choices: Choices) -> None:
    exact = row.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = np.argsort(-row, kind="stable")
    token = choices.tokens[index]
    choices.logprobs[index] = logprobs[token]
    choices.ranks[index] = 1 + int(np.flatnonzero(order == token)[0])
    choices.top_ids[index, :count] = order[:count]
    choices.top_logprobs[index, :count] = logprobs[order[:count]]
