"""Compute how often a sampled guess of a draft model is right, for several ways of sampling from both models.

    .venv/bin/python scripts/draft_model/measure_draws.py --draft FOLDER --answers answers.jsonl

At each place of some answers both models have a distribution, after the same filters. The table has the mean
probability that the model draws the guessed token. Nothing is sampled: each probability follows from the two
distributions.

    best      the maximum for any way: the sum of min(p, q)
    likeliest the guess is the likeliest token of the draft model
    walk      both walk their weights in the order of ids, to the same uniform number (ADR 21, until the race)
    race      both take the token with the least -log(number) / weight, with the same numbers, as quire's samplers do
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire import SamplingParams
from quire.compute.models import read_model
from quire.compute.models.hub import resolve_model
from quire.compute.native.backend import NativeBackend
from quire.compute.sampling.draws import Draws, TokenRules, parameter_columns
from quire.compute.sampling.reference import token_weights
from quire.compute.worker.model_runner import StepInputs
from quire.core.config import EngineConfig

Weights = NDArray[np.float64]
BLOCK, NUM_BLOCKS = 16, 32
WAYS = ("best", "likeliest", "walk", "race")
SETTINGS = ({"temperature": 1.0}, {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 0.3})


class EveryLogit:
    """A model that returns the logits at any places of a text."""

    def __init__(self, name: str) -> None:
        model = read_model(resolve_model(name))
        config = EngineConfig(model=name, max_num_batched_tokens=BLOCK * NUM_BLOCKS, max_num_seqs=1).resolved()
        parts = NativeBackend.of(config, model).load(NUM_BLOCKS, 0)
        self.vocab_size = model.spec.vocab_size
        self._runner, self._cache = parts.runner, parts.cache
        self._cache.allocate()

    def logits(self, text: list[int], places: NDArray[np.int64]) -> NDArray[np.float32]:
        """Return the logits after some places of a text."""
        count = len(text)
        inputs = StepInputs(
            entries=(0,),
            query_starts=np.array([0, count]),
            token_ids=np.minimum(np.array(text), self.vocab_size - 1),
            positions=np.arange(count),
            slots=(np.arange(count),),
            block_tables=(np.arange(NUM_BLOCKS)[None],),
            logit_starts=np.array([0, len(places)]),
            logit_indices=places,
            rows=np.zeros(1, np.int64),
        )
        found: NDArray[np.float32] = self._runner.run(inputs, self._cache).logits[:, : self.vocab_size].copy()
        return found


def distribution(logits: NDArray[np.float32], sampling: SamplingParams, size: int) -> Weights:
    """Return the probabilities of tokens after the filters of the sampler, padded to `size` tokens."""
    zero = np.zeros(1, np.int64)
    columns = parameter_columns(1, temperature=sampling.temperature, top_p=sampling.top_p)
    weights = token_weights(logits, Draws(zero, columns, zero, zero, zero - 1, TokenRules.none(1)), 0)
    assert weights is not None  # None is for greedy draws
    return np.pad(weights / weights.sum(), (0, size - len(weights)))


def chances(p: Weights, q: Weights) -> list[float]:
    """Return the probability that `p` draws the guess of `q`, for each of the `WAYS`.

    >>> [round(each, 3) for each in chances(np.array([0.5, 0.5, 0.0]), np.array([0.25, 0.5, 0.25]))]
    [0.75, 0.5, 0.5, 0.65]
    """
    ends_p, ends_q = np.cumsum(p), np.cumsum(q)
    both = np.minimum(ends_p, ends_q) - np.maximum(ends_p - p, ends_q - q)
    return [float(np.minimum(p, q).sum()), float(p[q.argmax()]), float(np.maximum(both, 0.0).sum()), _race(p, q)]


def _race(p: Weights, q: Weights) -> float:
    """Return the sum over i of 1 / sum over j of max(p[j] / p[i], q[j] / q[i])."""
    alive = (p > 0) | (q > 0)
    p, q = p[alive], q[alive]
    with np.errstate(divide="ignore"):
        order = np.argsort(q / p)
    p, q = p[order], q[order]
    before, after = np.cumsum(p), q.sum() - np.cumsum(q)
    shared = (p > 0) & (q > 0)
    return float((1.0 / (before[shared] / p[shared] + after[shared] / q[shared])).sum())


def places_of(line: dict[str, list[int]], most: int) -> NDArray[np.int64]:
    """Return evenly spaced places in an answer."""
    first, last = len(line["prompt"]) - 1, len(line["prompt"]) + len(line["answer"]) - 2
    return np.unique(np.linspace(first, last, most).astype(np.int64))


def pairs(options: argparse.Namespace) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield the logits of both models at each place."""
    model, draft = EveryLogit(options.model), EveryLogit(options.draft)
    for text in options.answers.read_text().splitlines()[: options.num_answers]:
        line = json.loads(text)
        tokens = (line["prompt"] + line["answer"])[: BLOCK * NUM_BLOCKS]
        places = places_of(line, options.places)
        yield from zip(model.logits(tokens, places), draft.logits(tokens, places), strict=True)


def main() -> None:
    """Compute and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--draft", required=True)
    parser.add_argument("--answers", type=Path, required=True, help="lines of answers.py; the first are not trained on")
    parser.add_argument("--num-answers", type=int, default=64)
    parser.add_argument("--places", type=int, default=16)
    options = parser.parse_args()
    found: dict[int, list[list[float]]] = {}
    for ours, theirs in pairs(options):
        for index, each in enumerate(SETTINGS):
            sampling = SamplingParams(**each)
            p, q = (distribution(logits, sampling, len(ours)) for logits in (ours, theirs))
            found.setdefault(index, []).append(chances(p, q))
    print(f"{'':24}" + "".join(f"{way:>11}" for way in WAYS))
    for index, each in enumerate(SETTINGS):
        name = ", ".join(f"{key} {value:g}" for key, value in each.items())
        means = np.array(found[index]).mean(axis=0)
        print(f"{name:24}" + "".join(f"{mean:>11.3f}" for mean in means) + f"   {len(found[index])} places")


if __name__ == "__main__":
    main()
