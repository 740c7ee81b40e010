"""Samplers: the reference by its definition, the native one by the reference, both by the exact distribution."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.sampling.draws import Draws, Sampler, TokenLists, TokenMasks
from quire.compute.sampling.native import NativeSampler
from quire.compute.sampling.reference import ReferenceSampler, changed, token_weights
from quire.compute.sampling.token_numbers import draw_keys, token_numbers
from quire.core.errors import InvariantError
from quire.core.sampling_params import DRAW_PARAMETERS
from support.draws import COLUMNS, FILTERS, LOGITS, VOCAB, draws_of_their_own, make_draws, random_parameters

RANDOM = np.random.default_rng(5)


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


NUM_DRAWS, NUM_COMPARED = 30_000, 1000


@pytest.mark.parametrize("name", FILTERS)
def test_draws_follow_the_exact_distribution_and_are_those_of_the_reference(name: str) -> None:
    draws, fewer = (make_draws(count, **FILTERS[name]) for count in (NUM_DRAWS, NUM_COMPARED))
    weights = token_weights(expected_logits(**FILTERS[name]), draws, 0)
    assert weights is not None
    expected = sample_tokens(SAMPLERS["reference"], fewer)  # slow, and compared draw by draw
    for other, sampler in SAMPLERS.items():
        tokens = expected if other == "reference" else sample_tokens(sampler, draws)
        assert chi_square_is_plausible(np.bincount(tokens, minlength=VOCAB), weights / weights.sum()), other
        # A number that falls within a rounding error of a border may fall to its other side.
        assert np.count_nonzero(tokens[:NUM_COMPARED] != expected) <= 1, other


def expected_logits(**settings: Any) -> NDArray[np.float32]:
    """Return `LOGITS` as the rules leave them, one token after another."""
    row = LOGITS.astype(np.float64)
    for token in range(VOCAB):
        limits = [settings.get(name, range(VOCAB)) for name in ("allowed", "mask")]
        if token in settings.get("banned", ()) or not all(token in limit for limit in limits):
            row[token] = -np.inf
        row[token] += settings.get("biased", {}).get(token, 0.0)
        count = settings.get("seen", {}).get(token)
        if count is not None:
            penalty = settings.get("repetition", 1.0)
            row[token] = row[token] * penalty if row[token] < 0 else row[token] / penalty
            row[token] -= settings.get("frequency", 0.0) * count
            row[token] -= settings.get("presence", 0.0) * (count > 0)
    return row.astype(np.float32)


@pytest.mark.parametrize("name", FILTERS)
def test_rules_change_logits_as_their_definition_says(name: str) -> None:
    found = changed(LOGITS, make_draws(3, **FILTERS[name]), 2)
    np.testing.assert_allclose(found, expected_logits(**FILTERS[name]), rtol=1e-6)


@pytest.mark.parametrize("name", FILTERS)
def test_greedy_choices_follow_the_rules(sampler: Sampler, name: str) -> None:
    draws = make_draws(1, **FILTERS[name] | {"temperature": 0.0})
    assert sample_tokens(sampler, draws).tolist() == [int(expected_logits(**FILTERS[name]).argmax())]


def test_each_draw_has_rules_of_its_own(sampler: Sampler) -> None:
    draws, alone = draws_of_their_own([FILTERS[name] | {"temperature": 0.8} for name in FILTERS])
    together = sample_tokens(sampler, draws)
    for index, single in enumerate(alone):
        assert sample_tokens(sampler, single)[0] == together[index]


def test_what_is_said_of_given_tokens_is_what_is_said_when_they_are_drawn(sampler: Sampler) -> None:
    draws = make_draws(50, temperature=2.0, logprobs=3)
    rows = LOGITS[None] if isinstance(sampler, ReferenceSampler) else padded(LOGITS[None])
    drawn = sampler.sample(rows, draws)
    given = sampler.report(rows, draws.logit_rows, drawn.tokens.copy(), draws.num_logprobs)
    for column in ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(given, column), getattr(drawn, column)), column


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"allowed": TokenLists(np.array([0, 1]), np.array([VOCAB]))}, "outside of the vocabulary"),
        ({"banned": TokenLists(np.array([0, 1]), np.array([-1]))}, "outside of the vocabulary"),
        ({"seen": TokenLists(np.array([0, 2]), np.array([1]))}, "do not fit"),
        ({"seen": TokenLists(np.array([0, 1]), np.array([1]))}, "differ in length"),
        ({"biased": TokenLists(np.array([0, 1]), np.array([1]))}, "differ in length"),
        ({"masks": TokenMasks(np.array([0, 0]), np.zeros((1, 2), np.uint32))}, "differ in length"),
        ({"masks": TokenMasks(np.array([1]), np.zeros((1, 2), np.uint32))}, "masks of the draws do not fit"),
        ({"masks": TokenMasks(np.array([-2]), np.zeros((1, 2), np.uint32))}, "masks of the draws do not fit"),
        ({"masks": TokenMasks(np.array([0]), np.zeros((1, 1), np.uint32))}, "masks of the draws do not fit"),
    ],
)
def test_rules_that_do_not_fit_are_refused_before_memory_is_touched(changes: dict[str, Any], message: str) -> None:
    native = SAMPLERS[_native.kernel_names()[0]]
    draws = make_draws(1)
    with pytest.raises(ValueError, match=message):
        sample_tokens(native, replace(draws, rules=replace(draws.rules, **changes)))


@pytest.mark.parametrize("shape", [(0, 1), (len(DRAW_PARAMETERS), 2), (len(DRAW_PARAMETERS) + 1, 1)])
def test_parameters_that_do_not_fit_are_refused_before_memory_is_touched(shape: tuple[int, int]) -> None:
    native = SAMPLERS[_native.kernel_names()[0]]
    with pytest.raises(ValueError, match="differ in length"):
        sample_tokens(native, replace(make_draws(1), parameters=np.zeros(shape, np.float32)))


def test_a_native_module_of_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _native.DRAW_PARAMETERS == DRAW_PARAMETERS
    monkeypatch.setattr("quire.compute.sampling.native.COMPILED_PARAMETERS", DRAW_PARAMETERS[::-1])
    with pytest.raises(InvariantError, match="install quire again"):
        samplers()


def test_the_native_samplers_take_any_parameters_as_the_reference_does() -> None:
    count = 3000
    rows = (RANDOM.standard_normal((count, VOCAB)) * RANDOM.choice([0.1, 1.0, 4.0], (count, 1))).astype(np.float32)
    seen, masked = {0: 1, 5: 0, 9: 3}, sorted(RANDOM.permutation(VOCAB)[:12].tolist())
    for rules in ({}, {"seen": seen}, {"mask": masked}, {"mask": masked, "banned": masked[:3]}, {"allowed": masked}):
        draws = replace(
            make_draws(count, **rules), logit_rows=np.arange(count), parameters=random_parameters(count, RANDOM)
        )
        expected = SAMPLERS["reference"].sample(rows, draws).tokens
        assert len(set(expected.tolist())) > 5
        for other in _native.kernel_names():
            # A number that falls within a rounding error of a border may fall to its other side.
            assert np.count_nonzero(SAMPLERS[other].sample(padded(rows), draws).tokens != expected) <= 2, other


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
        parameters=random_parameters(50, RANDOM),
        logit_rows=RANDOM.permutation(50),
        seeds=RANDOM.integers(0, 1 << 62, 50),
    )
    for name, sampler in samplers(num_threads).items():
        if name == "reference":
            continue
        together = sampler.sample(rows, draws).tokens
        for index in range(50):
            own = {field: np.ascontiguousarray(getattr(draws, field)[..., index : index + 1]) for field in COLUMNS}
            alone = replace(make_draws(1), **own)
            assert sampler.sample(rows, alone).tokens[0] == together[index]


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


def test_numbers_are_the_same_everywhere() -> None:
    # What native/tests/sampler_test.cpp compares with the native ones; neighbours are compared there, too.
    seeds, positions = np.array([0, 1, 42, -1, 123456789]), np.array([0, 0, 7, 3, 1 << 40])
    tokens = np.array([0, 1, 151935])
    for key, seed, position in zip(draw_keys(seeds, positions), seeds.tolist(), positions.tolist(), strict=True):
        expected = [_native.number_of(seed % (1 << 64), position, token) for token in tokens.tolist()]
        assert token_numbers(key, tokens).tolist() == expected


def test_the_highest_numbers_are_random_to_the_last_bits() -> None:
    """Tokens of tiny weights win only by such numbers: each step between them must be as likely as any other."""
    keys = draw_keys(np.arange(4000), np.arange(4000))
    highest = np.array([token_numbers(key, token_of_upper_bits(key, (1 << 32) - 1)) for key in keys])[:, 0]
    assert (highest > 1 - 2.0**-32).all() and (highest < 1).all()
    counts = np.histogram((1 - highest) * 2.0**32, bins=20, range=(0, 1))[0]
    assert chi_square_is_plausible(counts, np.full(20, 1 / 20))


def token_of_upper_bits(key: NDArray[np.uint32], word: int) -> NDArray[np.int64]:
    """Return the token whose number has these upper 32 bits: the hash, from its end to its start."""

    def unshifted(word: int, shift: int) -> int:
        return word ^ word >> shift ^ word >> 2 * shift

    def divided(word: int, factor: int) -> int:
        return word * pow(factor, -1, 1 << 32) % (1 << 32)

    word = unshifted(divided(unshifted(word, 14), 0x31848BAB), 15)
    word = unshifted((divided(word, 0xD35A2D97) - int(key[1])) % (1 << 32), 15)
    return np.array([divided(word, 0x21F0AAAD) ^ int(key[0])])


@pytest.mark.parametrize(("temperature", "noise"), [(1.0, 0.5), (0.7, 0.5), (1.0, 1.5)])
def test_similar_models_mostly_draw_the_same_token(sampler: Sampler, temperature: float, noise: float) -> None:
    """A race matches at least (1 - d) / (1 + d) of its draws, if d is the distance of the two distributions."""
    count = 1000 if isinstance(sampler, ReferenceSampler) else 20_000
    draws = make_draws(count, temperature=temperature)
    other = LOGITS + np.random.default_rng(9).normal(0, noise, VOCAB).astype(np.float32)
    shares = [token_weights(row, draws, 0) for row in (LOGITS, other)]
    p, q = (each / each.sum() for each in shares if each is not None)
    distance = np.abs(p - q).sum() / 2
    matches = np.mean(sample_tokens(sampler, draws) == sample_tokens(sampler, draws, other))
    least, deviation = (1 - distance) / (1 + distance), 0.5 / math.sqrt(count)
    assert least - 4 * deviation < matches <= 1 - distance + 4 * deviation
    # By one number for all tokens, a point on the line of their shares, fewer draws would match.
    ends, others = np.cumsum(p), np.cumsum(q)
    overlaps = np.minimum(ends, others) - np.maximum(ends - p, others - q)
    assert matches > np.maximum(overlaps, 0.0).sum() + 0.04


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1.3}, {"top_k": 4, "top_p": 0.9}])
def test_a_mask_is_a_list_of_allowed_tokens(sampler: Sampler, settings: dict[str, Any]) -> None:
    for allowed in ([], [39], list(range(32)), list(range(32, 40)), list(range(0, 40, 3)), list(range(40))):
        masked = sample_tokens(sampler, make_draws(300, mask=allowed, **settings))
        banned = [token for token in range(VOCAB) if token not in allowed]
        assert np.array_equal(masked, sample_tokens(sampler, make_draws(300, banned=banned, **settings)))


def test_a_mask_says_nothing_of_log_probabilities(sampler: Sampler) -> None:
    rows = LOGITS[None] if isinstance(sampler, ReferenceSampler) else padded(LOGITS[None])
    masked = sampler.sample(rows, make_draws(5, mask=[20], logprobs=3))
    free = sampler.report(rows, np.zeros(5, np.int64), np.full(5, 20), np.full(5, 3))
    for column in ("tokens", "logprobs", "ranks", "top_ids", "top_logprobs"):
        assert np.array_equal(getattr(masked, column), getattr(free, column)), column
