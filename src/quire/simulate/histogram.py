"""Histogram: the distribution of values, in constant memory.

Buckets are equally wide on a logarithmic scale, so the relative error of a percentile is bounded, here by one percent,
for any values. Count, sum, minimum and maximum are exact. A reservoir of samples was rejected: its error is random, and
p99 of a million values needs a large one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

RELATIVE_ERROR = 0.01
_LOG_GROWTH = 2 * math.log1p(RELATIVE_ERROR)
_LEAST = 1e-9
"""Smaller values count as 0."""
_LOWEST = math.floor(math.log(_LEAST) / _LOG_GROWTH)
PERCENTILES = (50.0, 90.0, 95.0, 99.0)
CURVE_PERCENTS = (*map(float, range(100)), 99.5, 99.9, 100.0)


@dataclass(frozen=True, slots=True)
class Distribution:
    """The summary of a histogram. Percentiles are exact to one percent; count, mean, least and most are exact."""

    count: int
    mean: float
    least: float
    p50: float
    p90: float
    p95: float
    p99: float
    most: float
    curve: tuple[float, ...] = ()
    """The percentiles of `CURVE_PERCENTS`; empty without values."""


class Histogram:
    """Counts values of 0 or more.

    >>> histogram = Histogram()
    >>> for value in range(1, 1001): histogram.add(value / 1000)
    >>> abs(histogram.percentile(50.0) / 0.5 - 1) < 0.011, histogram.distribution().most
    (True, 1.0)
    """

    __slots__ = ("_buckets", "count", "total", "least", "most")

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        self.count = 0
        self.total = 0.0
        self.least = math.inf
        self.most = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times. Mutates; O(1)."""
        bucket = math.floor(math.log(value if value > _LEAST else _LEAST) / _LOG_GROWTH)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + times
        self.count += times
        self.total += value * times
        self.least = min(self.least, value)
        self.most = max(self.most, value)

    def percentile(self, percent: float) -> float:
        """Return the value that `percent` of the values do not exceed, within one percent; 0 without values."""
        return self.percentiles([percent])[0]

    def percentiles(self, percents: Sequence[float]) -> list[float]:
        """Return the percentiles for ascending percents; zeros without values."""
        if not self.count:
            return [0.0] * len(percents)
        found: list[float] = []
        buckets, seen, value = iter(sorted(self._buckets)), 0, 0.0
        for percent in percents:
            wanted = max(1, math.ceil(self.count * percent / 100.0))
            while seen < wanted:
                bucket = next(buckets)
                seen += self._buckets[bucket]
                middle = math.exp((bucket + 0.5) * _LOG_GROWTH) if bucket > _LOWEST else 0.0
                value = min(max(middle, self.least), self.most)
            found.append(value)
        return found

    def distribution(self) -> Distribution:
        """Return the summary of the values. Does not mutate."""
        p50, p90, p95, p99 = self.percentiles(PERCENTILES)
        least = self.least if self.count else 0.0
        mean = self.total / self.count if self.count else 0.0
        curve = tuple(self.percentiles(CURVE_PERCENTS)) if self.count else ()
        return Distribution(self.count, mean, least, p50, p90, p95, p99, self.most, curve)
