"""Samples: repeated measurements, and their statistics.

A number is the **median** over the runs; its spread is the smallest and the largest run. A ratio is taken **within**
each run, between two consecutive measurements, and only then summarised: a temporary slowdown affects both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Summary:
    """The median of some runs, with the smallest and the largest.

    >>> summarize([3.0, 1.0, 2.0])
    Summary(median=2.0, low=1.0, high=3.0)
    """

    median: float
    low: float
    high: float


def summarize(samples: Sequence[float]) -> Summary:
    """Return median and spread of one or more samples."""
    return Summary(statistics.median(samples), min(samples), max(samples))


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Return the ratio of each run.

    >>> ratios([4.0, 9.0], [2.0, 3.0])
    [2.0, 3.0]
    """
    return [numerator / denominator for numerator, denominator in zip(numerators, denominators, strict=True)]


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the sample that `share` of all samples are below, computed as in the peer's script.

    >>> percentile([5.0, 1.0, 4.0, 2.0, 3.0], 0.9)
    5.0
    """
    return sorted(samples)[int(share * len(samples))]


def mean_of_last_periods(samples: Sequence[float], period: int) -> float:
    """Return the mean over the last complete periods, in which every event (a block boundary) is equally frequent.

    At least the first sample is left out: the first steps still prefill.

    >>> mean_of_last_periods([9.0, 1.0, 3.0, 1.0, 3.0], 2)
    2.0
    """
    num_samples = (len(samples) - 1) // period * period
    return statistics.fmean(samples[-num_samples:])


def show(value: float) -> str:
    """Return a number with three significant digits.

    >>> [show(value) for value in (0.01234, 1.5, 48.17, 2119.2)]
    ['0.0123', '1.50', '48.2', '2,119']
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(digits, 0)}f}"
