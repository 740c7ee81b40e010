"""The sampler of the device draws what the reference draws, on settings of every kind, and in any company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire.compute.sampling.draws import Choices, Draws, TokenLists, parameter_columns
from quire.compute.sampling.reference import ReferenceSampler, changed
from quire.compute.torch import sampling
from quire.compute.torch.count_table import NEUTRAL, CountTable
from quire.compute.torch.kernels.penalties import TILE, penalize
from quire.compute.torch.kernels.sampling import MAX_DRAWS, choose_tokens
from quire.compute.torch.sampling import TorchSampler, draw_settings
from quire.core.errors import InvalidConfigError
from quire.core.sampling_params import DRAW_PARAMETERS
from support.draws import FILTERS, LOGITS, VOCAB, draws_of_their_own, make_draws, make_rules, random_parameters

REFERENCE = ReferenceSampler()
FEW = settings(max_examples=12, deadline=None)  # a draw takes a tenth of a second in the interpreter


def rows_of(*rows: NDArray[np.float32]) -> torch.Tensor:
    """Return rows on the device, padded behind the vocabulary with what would be chosen."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.from_numpy(np.pad(np.stack(rows), ((0, 0), (0, 5)), constant_values=99.0)).to(device)


def sampled(row: NDArray[np.float32], draws: Draws) -> Choices:
    return TorchSampler(len(row)).sample(rows_of(row), draws)


def assert_same(found: Choices, expected: Choices) -> None:
    for column in ("tokens", "ranks", "top_ids"):
        assert np.array_equal(getattr(found, column), getattr(expected, column)), column
    for column in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(found, column), getattr(expected, column), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draws_of_every_kind_together_and_alone(temperature: float) -> None:
    kinds = [settings | {"logprobs": 3} for settings in FILTERS.values()]
    kinds = [{"temperature": temperature, "seed": 5} | settings for settings in kinds]
    draws, alone = draws_of_their_own(kinds)
    together = sampled(LOGITS, draws)
    assert_same(together, REFERENCE.sample(LOGITS[None], draws))
    if temperature:
        for index, single in enumerate(alone[::4]):
            assert sampled(LOGITS, single).tokens[0] == together.tokens[4 * index]


@pytest.mark.parametrize("name", FILTERS)
def test_rules_change_logits_to_the_bit(device: str, name: str) -> None:
    draws, _ = draws_of_their_own([FILTERS[name], FILTERS["masked"], FILTERS["none"]])
    rows = torch.from_numpy(np.stack([LOGITS] * 3)).to(device)
    found = sampling.changed(rows, draws).cpu().numpy()
    for index in range(3):
        assert np.array_equal(found[index], changed(LOGITS, draws, index))


@pytest.mark.parametrize("mask", [None, range(3, VOCAB, 2)])
def test_any_parameters_change_and_choose_as_the_reference_does(device: str, mask: range | None) -> None:
    random = np.random.default_rng(8)
    draws = replace(make_draws(40, mask=mask, seen={2: 1, 7: 0}), parameters=random_parameters(40, random))
    draws = replace(draws, logit_rows=np.arange(40))
    rows = (random.standard_normal((40, VOCAB)) * 3).astype(np.float32)
    chosen = TorchSampler(VOCAB).sample(rows_of(*rows), draws).tokens
    assert np.array_equal(chosen, REFERENCE.sample(rows, draws).tokens)


@st.composite
def drawn_rows(draw: st.DrawFn) -> tuple[NDArray[np.float32], dict[str, Any]]:
    """A row of up to 300 tokens, of few or of many different logits, and settings; seeds make the rest."""
    random = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    size = draw(st.sampled_from([1, 2, 63, 64, 65, 300]))
    spread = draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    row = (random.standard_normal(size) * spread).astype(np.float32)
    if draw(st.booleans()):
        row = np.round(row)
    values: dict[str, Any] = {
        "temperature": draw(st.sampled_from([0.01, 0.3, 1.0, 2.5, 50.0])),
        "top_k": draw(st.sampled_from([0, 1, 2, 7, 64, 299, 1000])),
        "top_p": draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])),
        "min_p": draw(st.sampled_from([0.0, 0.0, 1e-4, 0.2, 1.0])),
        "seed": draw(st.integers(0, (1 << 63) - 1)),
    }
    return row, values


@FEW
@given(case=drawn_rows())
def test_any_filters_on_any_logits(case: tuple[NDArray[np.float32], dict[str, Any]]) -> None:
    row, values = case
    draws = make_draws(4, **values)
    columns = draw_settings(draws, draws.logit_rows)
    rows = rows_of(row)
    # Several tiles of few tokens, and lists longer than a piece of theirs.
    chosen = choose_tokens(rows[:, : len(row)], torch.from_numpy(columns).to(rows.device), tile=64, list_tile=32)
    assert chosen.tolist() == REFERENCE.sample(row[None], draws).tokens.tolist()


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rules", [{}, {"seen": {2: 1}, "repetition_penalty": 1.5}, {"top_n_sigma": 1.0}], ids=str)
def test_a_row_that_is_not_finite_has_no_token(number: float, rules: dict[str, Any], device: str) -> None:
    rows = np.stack([LOGITS] * 4)
    rows[1, VOCAB - 1], rows[2, 0] = number, number
    draws = replace(make_draws(4, temperature=0.9, **rules), logit_rows=np.arange(4))
    sampler = TorchSampler(VOCAB)
    chosen = sampler.choose(rows_of(*rows), draws)
    expected = REFERENCE.sample(np.stack([LOGITS] * 4), draws).tokens
    assert chosen.tolist() == [expected[0], -1, -1, expected[3]]
    for tile in (64, 2048):
        settings = torch.from_numpy(draw_settings(draws, draws.logit_rows)).to(device)
        found = choose_tokens(rows_of(*rows)[:, :VOCAB], settings, tile=tile)
        assert (found < 0).tolist() == [False, True, True, False]
    # Where the host waits, it learns from elsewhere that the row has failed; any token will do.
    assert sampler.sample(rows_of(*rows), replace(draws, num_logprobs=np.full(4, 2))).tokens.min() >= 0


def test_tiles_change_no_token(device: str) -> None:
    random = np.random.default_rng(11)
    row = torch.from_numpy(random.standard_normal((1, 700)).astype(np.float32)).to(device)
    settings = torch.tensor(
        [[0, 1.0, k, p, 0, 3_000_000_000, 37] for k, p in ((0, 1.0), (40, 1.0), (0, 0.9), (300, 0.8))],
        dtype=torch.float64,
        device=device,
    )
    found = [choose_tokens(row, settings, tile=tile, list_tile=piece) for tile, piece in ((64, 32), (1024, 128))]
    assert torch.equal(*found)
    assert torch.equal(choose_tokens(row, settings), found[0])


def test_more_draws_than_a_launch_takes_each_from_its_own_row(device: str) -> None:
    count = MAX_DRAWS + 3
    rows = torch.zeros((count, 16), device=device)
    rows[torch.arange(count), torch.arange(count) * 5 % 16] = 30.0
    settings = torch.zeros((count, 7), dtype=torch.float64, device=device)
    settings[:, 0] = torch.arange(count).flip(0)
    settings[0, 1], settings[-1, 1] = 1.0, 1.0
    settings[:, 3], settings[:, 5] = 1.0, torch.arange(count)
    assert choose_tokens(rows, settings, tile=16, list_tile=16).tolist() == [
        (count - 1 - index) * 5 % 16 for index in range(count)
    ]


@FEW
@given(seed=st.integers(0, 1 << 32), half=st.sampled_from([torch.float32, torch.bfloat16]))
def test_counts_on_the_device_are_those_of_texts(seed: int, half: torch.dtype) -> None:
    """Draws of rows with and without penalties, whose texts begin again at any time: as with counts from the host."""
    random = np.random.default_rng(seed)
    sampler, table = TorchSampler(VOCAB), CountTable(VOCAB, rows_of(LOGITS).device)
    texts: dict[int, dict[int, int]] = {}
    for position in range(4):
        chosen = np.sort(random.choice(6, random.integers(1, 7), replace=False))
        goes_on = np.array([row in texts and random.random() < 0.7 for row in chosen])
        for row in chosen[~goes_on]:
            texts[row] = dict.fromkeys(random.choice(VOCAB, random.integers(0, 9)).tolist(), 0)
        count = len(chosen)
        penalties = random.choice([0.0, 0.0, -1.3, 0.7], (2, count)).astype(np.float32)
        named = {"frequency_penalty": penalties[0], "presence_penalty": penalties[1]}
        named |= {"repetition_penalty": random.choice([1.0, 1.7, 0.6], count).astype(np.float32)}
        is_penalized = np.logical_or.reduce([named[name] != value for name, value in NEUTRAL.items()])
        columns = parameter_columns(count, temperature=0.8, top_k=9)
        for name, values in named.items():
            columns[DRAW_PARAMETERS.index(name)] = values
        mine = [texts[row] if flag else {} for row, flag in zip(chosen, is_penalized, strict=True)]
        rules = replace(make_rules(count, biased={3: 1.5}, banned=[4]), **lists_of(mine))
        full = replace(make_draws(count), parameters=columns, seeds=chosen, rules=rules)
        full = replace(full, positions=np.full(count, position), logit_rows=np.arange(count))
        logits = rows_of(*(random.standard_normal((count, VOCAB)) * 3).astype(np.float32)).to(half)
        expected = REFERENCE.sample(logits[:, :VOCAB].float().cpu().numpy(), full).tokens
        begun = [{} if on else text for on, text in zip(goes_on, mine, strict=True)]
        rest, counted = table.take(replace(full, rules=replace(rules, **lists_of(begun))), chosen, goes_on)
        found = sampler.choose(logits, rest, counted)
        assert np.array_equal(found.cpu().numpy(), expected)
        if counted is not None:
            counted.add(found)
        for row, token, flag in zip(chosen, expected.tolist(), is_penalized, strict=True):
            if flag:
                texts[row][token] = texts[row].get(token, 0) + 1
            else:
                del texts[row]


def lists_of(texts: list[dict[int, int]]) -> dict[str, Any]:
    """Return the rules of draws whose texts have these tokens, with their counts in the output."""
    counts = [np.array(list(text.values()), np.int64) for text in texts]
    return {"seen": TokenLists.of([np.array(list(text), np.int64) for text in texts]), "counts": np.concatenate(counts)}


def test_penalties_are_rounded_as_in_the_definition(device: str) -> None:
    """Rows of any width: products and quotients whose last bit would differ if they were rounded together or not."""
    random = np.random.default_rng(5)
    size = 2 * TILE + 37
    rows = (random.standard_normal((3, size)) * 9).astype(np.float32)
    rows[:, ::50] = -np.inf
    table = random.integers(0, 6, (4, size)).astype(np.int32)
    settings = [(2, 0, 1.7, -0.37, 0.21), (0, 3, 0.63, 0.91, -1.9)]
    settings = [(one[0], one[1], *map(np.float32, one[2:])) for one in settings]
    expected = rows.copy()
    for row, place, repetition, frequency, presence in settings:
        given, counts = rows[row], (np.maximum(table[place], 1) - 1).astype(np.float32)
        scaled = np.where(given < 0, given * repetition, given / repetition)
        lowered = scaled - frequency * counts
        lowered = np.where(counts > 0, lowered - presence, lowered)
        expected[row] = np.where(table[place] > 0, lowered, given)
    found = torch.from_numpy(rows).to(device)
    penalize(found, torch.from_numpy(table).to(device), torch.tensor(settings, dtype=torch.float64, device=device))
    assert np.array_equal(found.cpu().numpy(), expected)


def test_greedy_is_the_highest_logit_and_the_lowest_id() -> None:
    row = np.zeros(VOCAB, np.float32)
    row[[5, 17, 33]] = 3.0
    assert sampled(row, make_draws(2, temperature=0.0)).tokens.tolist() == [5, 5]
    assert sampled(row, make_draws(1, temperature=1e-42)).tokens.tolist() == [5]
    banned = [token for token in range(VOCAB) if token != 36]
    assert sampled(row, make_draws(2, banned=banned)).tokens.tolist() == [36] * 2


def test_what_is_reported_of_given_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties, both zeros, more rows than a slab, and as many of the likeliest as there are tokens."""
    monkeypatch.setattr(sampling, "SLAB", 3)
    random = np.random.default_rng(4)
    rows = np.stack([np.round(random.standard_normal(VOCAB)), *random.standard_normal((3, VOCAB)) * 4])
    rows = rows.astype(np.float32)
    rows[0, :4] = 0.0, -0.0, -0.0, 0.0
    logit_rows, tokens = random.integers(0, 4, 8), random.integers(0, VOCAB, 8)
    counts = np.array([0, 1, 5, VOCAB, 2, 0, 0, 3])
    found = TorchSampler(VOCAB).report(rows_of(*rows), logit_rows, tokens.copy(), counts)
    assert_same(found, REFERENCE.report(rows, logit_rows, tokens.copy(), counts))


def test_only_draws_that_ask_are_reported() -> None:
    draws = replace(make_draws(3, temperature=2.0), num_logprobs=np.array([-1, 2, -1]))
    assert_same(sampled(LOGITS, draws), REFERENCE.sample(LOGITS[None], draws))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_read_as_they_are(dtype: torch.dtype) -> None:
    rows = rows_of(LOGITS).to(dtype)
    draws, _ = draws_of_their_own([{"temperature": 0.8, "seed": 3, "logprobs": 2} | kind for kind in FILTERS.values()])
    exact = rows[:, :VOCAB].float().cpu().numpy()
    assert_same(TorchSampler(VOCAB).sample(rows, draws), REFERENCE.sample(exact, draws))


def test_logits_are_not_mutated() -> None:
    rows = rows_of(LOGITS)
    before = rows.clone()
    draws, _ = draws_of_their_own([FILTERS["all_rules"], FILTERS["masked"] | {"logprobs": 2}])
    TorchSampler(VOCAB).sample(rows, draws)
    assert torch.equal(rows, before)


def test_a_vocabulary_that_keys_cannot_hold_is_refused() -> None:
    TorchSampler(1 << 19)
    with pytest.raises(InvalidConfigError, match="at most 524288"):
        TorchSampler((1 << 19) + 1)
