"""Samplers: the reference by its definition, the native one by the reference, both by the exact distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.sampling.draws import Draws, Sampler
from quire.compute.sampling.native import NativeSampler
from quire.compute.sampling.reference import ReferenceSampler, token_weights, uniform

VOCAB = 40
RANDOM = np.random.default_rng(5)
# Peaked, with ties, and with some tokens that are all but impossible.
LOGITS = np.concatenate([np.linspace(4, -4, 30), [2.0, 2.0, 1.0, 1.0, -30, -50, -80, -100, 3.5, 3.5]]).astype(
    np.float32
)

FILTERS: dict[str, dict[str, Any]] = {
    "none": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 7},
    "top_k_in_a_tie": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "top_p_of_little": {"top_p": 1e-6},
    "min_p": {"min_p": 0.1},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "banned": {"banned": [0, 39, 31]},
    "banned_and_filtered": {"banned": [0, 1], "top_k": 5, "top_p": 0.7},
}


def samplers(num_threads: int = 2) -> dict[str, Sampler]:
    found: dict[str, Sampler] = {"reference": ReferenceSampler()}
    for name in _native.kernel_names():
        team = _native.ThreadTeam(num_threads)
        found[name] = NativeSampler(_native.kernels(name), team, VOCAB)
    return found


SAMPLERS = samplers()


@pytest.fixture(params=SAMPLERS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    found: Sampler = SAMPLERS[request.param]
    return found


def padded(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return rows as the native decoder gives them: up to a multiple of 16, with anything behind the vocabulary."""
    return np.pad(rows, ((0, 0), (0, -rows.shape[1] % 16)), constant_values=99.0)


def make_draws(count: int, **settings: Any) -> Draws:
    """Return draws from row 0 with settings in common, at positions 0, 1, 2, …"""
    banned = sorted(settings.get("banned", ()))

    def integers(name: str, default: int) -> NDArray[np.int64]:
        return np.full(count, settings.get(name, default), np.int64)

    def numbers(name: str, default: float) -> NDArray[np.float32]:
        return np.full(count, settings.get(name, default), np.float32)

    return Draws(
        logit_rows=integers("logit_row", 0),
        temperatures=numbers("temperature", 1.0),
        top_k=integers("top_k", 0),
        top_p=numbers("top_p", 1.0),
        min_p=numbers("min_p", 0.0),
        seeds=integers("seed", 1),
        positions=np.arange(count, dtype=np.int64),
        banned_starts=np.arange(count + 1, dtype=np.int64) * len(banned),
        banned_ids=np.tile(np.array(banned, np.int64), count),
        num_logprobs=integers("logprobs", -1),
    )


def sample_tokens(sampler: Sampler, draws: Draws, row: NDArray[np.float32] = LOGITS) -> NDArray[np.int64]:
    rows = row[None] if isinstance(sampler, ReferenceSampler) else padded(row[None])
    return sampler.sample(rows, draws).tokens


def chi_square_is_plausible(counts: NDArray[np.int64], shares: NDArray[np.float64]) -> bool:
    """Return whether counts are within five deviations of what the shares let expect; rare tokens are pooled."""
    expected = shares * counts.sum()
    rare = expected < 10
    seen = np.append(counts[~rare], counts[rare].sum())
    awaited = np.append(expected[~rare], expected[rare].sum())
    keep = awaited > 0
    if seen[~keep].any():
        return False
    freedom = keep.sum() - 1
    statistic = float((np.square(seen - awaited)[keep] / awaited[keep]).sum())
    return freedom == 0 or abs(statistic - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_exact_distribution(sampler: Sampler, name: str) -> None:
    count = 20_000 if isinstance(sampler, ReferenceSampler) else 100_000
    draws = make_draws(count, **FILTERS[name])
    tokens = sample_tokens(sampler, draws)
    row = LOGITS.copy()
    row[FILTERS[name].get("banned", [])] = -np.inf
    weights = token_weights(row, draws, 0)
    assert weights is not None
    assert chi_square_is_plausible(np.bincount(tokens, minlength=VOCAB), weights / weights.sum())


@pytest.mark.parametrize("name", FILTERS)
def test_the_native_samplers_draw_what_the_reference_draws(name: str) -> None:
    draws = make_draws(2000, **FILTERS[name])
    expected = sample_tokens(SAMPLERS["reference"], draws)
    for other in _native.kernel_names():
        # A number that falls within a rounding error of a border may fall to its other side.
        assert np.count_nonzero(sample_tokens(SAMPLERS[other], draws) != expected) <= 1, other


def test_filters_take_away_what_their_definition_says() -> None:
    def kept(**settings: Any) -> list[int]:
        weights = token_weights(np.log(np.array([4, 8, 2, 4, 1, 1], np.float32)), make_draws(1, **settings), 0)
        assert weights is not None
        return np.flatnonzero(weights).tolist()

    assert kept() == [0, 1, 2, 3, 4, 5]
    assert kept(top_k=2) == [0, 1]  # 0 and 3 are as likely: the lower id counts as likelier
    assert kept(top_k=3) == [0, 1, 3]
    assert kept(top_p=0.39) == [1]
    assert kept(top_p=0.41) == [0, 1]
    assert kept(min_p=0.26) == [0, 1, 3]
    assert kept(min_p=0.2, top_p=0.5) == [0, 1]  # 8 of the 18 that min_p left is less than half
    assert kept(top_k=3, top_p=0.5) == [1]  # 8 of the 16 that top_k left is half


def test_greedy_is_the_highest_logit_and_the_lowest_id(sampler: Sampler) -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[5, 17, 33]] = 3.0
    assert sample_tokens(sampler, make_draws(3, temperature=0.0), row).tolist() == [5, 5, 5]
    assert sample_tokens(sampler, make_draws(1, temperature=0.0, banned=[5]), row).tolist() == [17]
    assert sample_tokens(sampler, make_draws(1, temperature=1e-42), row).tolist() == [5]


def test_the_last_token_that_is_not_banned_is_chosen(sampler: Sampler) -> None:
    banned = [token for token in range(VOCAB) if token != 36]
    assert sample_tokens(sampler, make_draws(4, banned=banned)).tolist() == [36] * 4


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_draw_does_not_depend_on_the_draws_beside_it(num_threads: int) -> None:
    rows = padded(RANDOM.standard_normal((50, VOCAB)).astype(np.float32) * 2)
    draws = replace(
        make_draws(50),
        logit_rows=RANDOM.permutation(50),
        temperatures=RANDOM.choice([0.0, 0.7, 1.5], 50).astype(np.float32),
        top_k=RANDOM.choice([0, 3, 10], 50),
        top_p=RANDOM.choice([1.0, 0.6], 50).astype(np.float32),
        seeds=RANDOM.integers(0, 1 << 62, 50),
    )
    for name, sampler in samplers(num_threads).items():
        if name == "reference":
            continue
        together = sampler.sample(rows, draws).tokens
        for index in range(50):
            columns = {field: getattr(draws, field)[index : index + 1] for field in COLUMNS}
            alone = replace(make_draws(1), **columns)
            assert sampler.sample(rows, alone).tokens[0] == together[index]


COLUMNS = ("logit_rows", "temperatures", "top_k", "top_p", "min_p", "seeds", "positions")


def test_log_probabilities_are_those_of_the_model(sampler: Sampler) -> None:
    draws = make_draws(200, temperature=3.0, top_k=30, banned=[0], logprobs=5)
    rows = LOGITS[None] if isinstance(sampler, ReferenceSampler) else padded(LOGITS[None])
    choices = sampler.sample(rows, draws)
    exact = LOGITS.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    np.testing.assert_allclose(choices.logprobs, exact[choices.tokens], atol=1e-6)
    order = np.argsort(-LOGITS, kind="stable")
    assert (order[choices.ranks - 1] == choices.tokens).all()
    assert (choices.top_ids == order[:5]).all()
    np.testing.assert_allclose(choices.top_logprobs, np.tile(exact[order[:5]], (200, 1)), atol=1e-6)
    assert 0 not in choices.tokens  # banned, and yet the likeliest of the model
    assert choices.top_ids[0, 0] == 0


def test_uniform_numbers_are_the_same_everywhere_and_unrelated() -> None:
    seeds = [0, 1, 2, 77, (1 << 63) - 1]
    assert all(_native.uniform(seed, p) == uniform(seed, p) for seed in seeds for p in (0, 1, 5, 1 << 40))
    grid = np.array([[uniform(seed, position) for position in range(200)] for seed in range(200)])
    assert abs(grid.mean() - 0.5) < 0.01
    for one, other in ((grid[:, 1:], grid[:, :-1]), (grid[1:], grid[:-1]), (grid[1:, :-1], grid[:-1, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 0.025
