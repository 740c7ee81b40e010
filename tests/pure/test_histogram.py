"""Histogram: counts, sums and extremes are exact, and every percentile is that of the sorted values to one percent."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.simulate.histogram import CURVE_PERCENTS, PERCENTILES, Distribution, Histogram

COUNTED = st.lists(st.tuples(st.floats(0, 1e9) | st.integers(0, 5).map(float), st.integers(1, 5)), max_size=30)


def histogram_of(counted: list[tuple[float, int]]) -> Histogram:
    histogram = Histogram()
    for value, times in counted:
        if times == 1:
            histogram.add(value)
        else:
            histogram.add(value, times)
    return histogram


def exact_percentile(values: list[float], percent: float) -> float:
    """The least value that this share of all values do not exceed."""
    return next(
        value for index, value in enumerate(sorted(values)) if (index + 1) * 100 >= len(values) * percent - 1e-9
    )


@given(COUNTED, st.lists(st.sampled_from([*CURVE_PERCENTS]), max_size=4).map(sorted))
def test_a_value_that_came_often_is_as_many_values(counted: list[tuple[float, int]], percents: list[float]) -> None:
    histogram = histogram_of(counted)
    values = [value for value, times in counted for _ in range(times)]
    found = histogram.percentiles(percents)
    if not values:
        assert found == [0.0] * len(percents)
        return
    for percent, percentile in zip(percents, found, strict=True):
        exact = exact_percentile(values, percent)
        assert percentile == pytest.approx(exact, rel=0.0101, abs=1e-9)
        assert min(values) <= percentile <= max(values)
        assert histogram.percentile(percent) == percentile
    assert found == sorted(found)
    assert (histogram.count, histogram.least, histogram.most) == (len(values), min(values), max(values))
    assert histogram.total == pytest.approx(math.fsum(values))


@given(COUNTED)
def test_a_distribution_says_what_the_histogram_knows(counted: list[tuple[float, int]]) -> None:
    histogram = histogram_of(counted)
    found = histogram.distribution()
    values = [value for value, times in counted for _ in range(times)]
    if not values:
        assert found == Distribution(0, *[0.0] * 7)
        return
    assert (found.count, found.least, found.most) == (len(values), min(values), max(values))
    assert found.mean == pytest.approx(statistics.fmean(values))
    assert [found.p50, found.p90, found.p95, found.p99] == histogram.percentiles(PERCENTILES)
    assert list(found.curve) == histogram.percentiles(CURVE_PERCENTS)


def test_the_percentiles_are_those_that_their_names_say() -> None:
    histogram = histogram_of([(float(value), 1) for value in range(1, 10_001)])
    found = histogram.distribution()
    for percentile, exact in ((found.p50, 5000), (found.p90, 9000), (found.p95, 9500), (found.p99, 9900)):
        assert percentile == pytest.approx(exact, rel=0.0101)
    assert len(found.curve) == len(CURVE_PERCENTS) == 103
    assert (found.curve[0], found.curve[-1]) == (pytest.approx(1, rel=0.0101), pytest.approx(10_000, rel=0.0101))
    assert found.curve[CURVE_PERCENTS.index(99.9)] == pytest.approx(9990, rel=0.0101)


def test_values_that_are_next_to_nothing_are_nothing_and_lie_below_all_others() -> None:
    histogram = histogram_of([(0.0, 3), (1e-12, 1), (1e-9, 1), (2e-9, 1), (1.0, 1)])
    assert histogram.percentiles([1.0, 50.0, 70.0]) == [0.0, 0.0, 0.0]
    assert histogram.percentile(80.0) == pytest.approx(2e-9, rel=0.0101)
    assert histogram.percentile(100.0) == 1.0


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    histogram = Histogram()
    for index in range(20_000):
        histogram.add(1.0 + index / 20_000)
    assert len(histogram._buckets) <= 1 + math.log(2) / (2 * math.log1p(0.01)) + 1
