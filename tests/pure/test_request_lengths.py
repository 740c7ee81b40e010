"""Lengths of requests: what a text of them stands for, at both sides of every bound, and exact shares of pairs."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError
from quire.simulate import lengths as module
from quire.simulate.lengths import ALLOWED, Length, RequestLengths, sample_pairs

LARGEST = 1 << 30
PAIRS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=12)


@pytest.mark.parametrize(
    ("text", "median", "p95"),
    [
        ("1", 1, 1),
        (str(LARGEST), LARGEST, LARGEST),
        ("2k", 2000, 2000),
        ("2K", 2048, 2048),
        (" 3 ", 3, 3),
        ("400/400", 400, 400),
        ("400 / 2k", 400, 2000),
        ("1K/4K", 1024, 4096),
        ("100+-0", 100, 100),
        ("1±100", 0.01, 1.5),
    ],
)
def test_a_text_of_lengths_has_its_median_and_its_95th_percentile(text: str, median: float, p95: float) -> None:
    found = Length.parse(text)
    assert math.exp(found.location) == pytest.approx(median, rel=1e-4)
    if text != "1±100":
        assert found.quantile(0.95) == p95
        assert found.quantile(0.5) == median


@pytest.mark.parametrize(("mean", "deviation"), [(100, 50), (512, 200), (100, 10_000), (7, 1)])
@pytest.mark.parametrize("sign", ["±", "+-"])
def test_mean_and_deviation_are_those_of_a_lognormal_distribution(mean: int, deviation: int, sign: str) -> None:
    found = Length.parse(f"{mean}{sign}{deviation}")
    variance = found.scale**2
    assert math.exp(found.location + variance / 2) == pytest.approx(mean)
    assert math.sqrt(math.expm1(variance)) * mean == pytest.approx(deviation)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("", ALLOWED),
        ("x", ALLOWED),
        ("5M", ALLOWED),
        ("-3", ALLOWED),
        ("1.5", ALLOWED),
        ("5 6", ALLOWED),
        ("1/2/3", ALLOWED),
        ("512±", ALLOWED),
        ("1" * 41, ALLOWED),
        ("5/", ALLOWED),
        ("5//6", ALLOWED),
        ("٤", ALLOWED),
        ("5" + " " * 40, ALLOWED),
        ("0", f"tokens from 1 to {LARGEST}"),
        ("0/5", f"tokens from 1 to {LARGEST}"),
        (str(LARGEST + 1), f"tokens from 1 to {LARGEST}"),
        ("5/4", "a 95th percentile that is at least the median, 5"),
        (f"5/{LARGEST + 1}", "a 95th percentile that is at least the median, 5"),
        ("5±501", "a deviation of at most 100 times the mean, 500"),
    ],
)
def test_what_is_no_length_is_refused_under_the_name_of_its_setting(text: str, allowed: str) -> None:
    with pytest.raises(InvalidConfigError) as caught:
        Length.parse(text, "prompt")
    assert (caught.value.field, caught.value.value, caught.value.allowed) == ("prompt", text, allowed)
    with pytest.raises(InvalidConfigError) as caught:
        Length.parse(text)
    assert caught.value.field == "tokens"


def test_no_length_is_below_one_or_beyond_the_largest() -> None:
    assert Length.parse("1±100").quantile(0.001) == 1
    assert Length.parse(f"{LARGEST}±{LARGEST}").quantile(0.999) == LARGEST
    assert Length.parse("5/" + str(LARGEST)).quantile(0.95) == LARGEST


# ---- pairs ---------------------------------------------------------------------------------------------------------


@given(PAIRS, st.integers(2, 60))
def test_pairs_are_cut_to_the_context_with_a_token_of_output_at_least(
    pairs: list[tuple[int, int]], longest: int
) -> None:
    found = RequestLengths.of_pairs(pairs, longest)
    expected = []
    for prompt, output in pairs:
        kept = min(prompt, longest - 1)
        expected.append((kept, min(output, longest - kept)))
    assert sorted(found.pairs) == sorted(expected)
    assert [sum(pair) for pair in found.pairs] == sorted(sum(pair) for pair in expected)
    assert found.num_cut == sum(sum(pair) > longest for pair in pairs)


@given(PAIRS)
def test_means_and_shares_are_those_of_lists(pairs: list[tuple[int, int]]) -> None:
    found = RequestLengths.of_pairs(pairs, 1000)
    assert found.mean_prompt == pytest.approx(statistics.fmean(prompt for prompt, _ in pairs))
    assert found.mean_output == pytest.approx(statistics.fmean(output for _, output in pairs))
    contexts = [prompt + place for prompt, output in pairs for place in range(1, output + 1)]
    assert found.mean_context == pytest.approx(statistics.fmean(contexts))
    totals, prompts = sorted(map(sum, pairs)), sorted(prompt for prompt, _ in pairs)
    for count in range(1, len(pairs) + 1):
        share = (count - 0.5) / len(pairs)
        assert (found.total(share), found.prompt(share)) == (totals[count - 1], prompts[count - 1])
    assert (found.total(0.0), found.prompt(0.0)) == (totals[0], prompts[0])
    assert (found.total(1.0), found.prompt(1.0)) == (totals[-1], prompts[-1])


def test_the_nearest_rank_is_the_first_that_so_large_a_share_stays_within() -> None:
    found = RequestLengths.of_pairs([(number, 1) for number in range(1, 21)], 100)
    assert [found.prompt(share) for share in (0.05, 0.0501, 0.5, 0.95, 0.951)] == [1, 2, 10, 19, 20]
    assert [found.total(share) for share in (0.05, 0.0501, 0.5, 0.95, 0.951)] == [2, 3, 11, 20, 21]


def test_a_plan_of_no_requests_is_refused() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        RequestLengths.of_pairs([], 100)
    assert str(caught.value) == "requests is 'none'; allowed: at least one: a plan needs their lengths"


@pytest.mark.parametrize("part", [0, 1])
def test_points_cover_each_square_of_both_distributions_evenly(part: int) -> None:
    length = Length.parse("1k/20k")
    pairs = RequestLengths.of_lengths(length, length, 1 << 40).pairs
    assert len(pairs) == 1000
    edges = [0, *(length.quantile(share / 10) for share in range(1, 10)), LARGEST + 1]
    column = sorted(pair[part] for pair in pairs)
    for low, high in itertools.pairwise(edges):
        assert sum(low < value <= high for value in column) == pytest.approx(100, abs=2)
    for first in range(0, 10, 5):
        for second in range(0, 10, 5):
            inside = [
                pair
                for pair in pairs
                if edges[first] < pair[0] <= edges[first + 5] and edges[second] < pair[1] <= edges[second + 5]
            ]
            assert len(inside) == pytest.approx(250, abs=5)


def test_of_many_pairs_a_sample_is_kept_with_the_longest_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SAMPLE", 10)
    pairs = [(number, 100 - number % 7) for number in range(100)]
    few = sample_pairs(pairs[:10])
    assert few == pairs[:10]
    longest = (1, 10**6)
    for place in (0, 50, 99):
        given_pairs = [*pairs[:place], longest, *pairs[place:]]
        found = sample_pairs(iter(given_pairs))
        assert len(found) == 10
        assert longest in found
        assert set(found) <= set(given_pairs)
        assert found == sample_pairs(given_pairs), "always the same one"
    assert sample_pairs([]) == []
