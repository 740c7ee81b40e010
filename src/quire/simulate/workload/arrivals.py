"""Arrivals: endless times at which requests are due, in seconds from the start, drawn from a seed.

    fixed      evenly spaced
    poisson    many independent users: gaps are exponential, with coefficient of variation 1
    gamma      gaps with another coefficient of variation: above 1 requests arrive in clusters, below 1 nearly evenly
    bursts     poisson, but at `peak` times the rate for a share of the time, and at a lower rate in between

Each pattern is an iterator, so that a workload of hours does not hold all its times.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from quire.core.setting_checks import require_number, require_one_of

FIXED, POISSON, GAMMA, BURSTS = "fixed", "poisson", "gamma", "bursts"
PATTERNS = (FIXED, POISSON, GAMMA, BURSTS)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A pattern of arrivals at a mean rate of `rate` per second.

    `variation` is the coefficient of variation of gamma gaps. Bursts begin every `period_s`, last for `burst_share` of
    that time, and have `peak` times the rate.
    """

    rate: float
    pattern: str = POISSON
    variation: float = 1.0
    peak: float = 4.0
    burst_share: float = 0.1
    period_s: float = 60.0

    def __post_init__(self) -> None:
        require_one_of("pattern", self.pattern, PATTERNS)
        require_number("rate", self.rate, 1e-6, 1e9)
        require_number("variation", self.variation, 1e-2, 1e2)
        require_number("burst_share", self.burst_share, 1e-3, 0.999)
        require_number("peak", self.peak, 1.0, 1.0 / self.burst_share)
        require_number("period_s", self.period_s, 1e-3, 1e9)

    def times(self, seed: int) -> Iterator[float]:
        """Yield endless times; the same seed gives the same ones. Does not mutate.

        >>> list(itertools.islice(Arrivals(2.0, FIXED).times(seed=0), 3))
        [0.0, 0.5, 1.0]
        """
        rng = random.Random(seed)
        if self.pattern == FIXED:
            return (index / self.rate for index in itertools.count())
        if self.pattern == GAMMA:
            shape = 1.0 / self.variation**2
            return itertools.accumulate(rng.gammavariate(shape, 1.0 / (shape * self.rate)) for _ in itertools.count())
        gaps = (rng.expovariate(self.rate) for _ in itertools.count())
        unhurried = itertools.accumulate(gaps)
        return unhurried if self.pattern == POISSON else map(self._hurried, unhurried)

    def _hurried(self, time_s: float) -> float:
        """Return the time at which a stream with bursts has as many arrivals as an even stream at `time_s`."""
        period, within = divmod(time_s / self.period_s, 1.0)
        in_bursts = self.peak * self.burst_share
        if within < in_bursts:
            at = within / self.peak
        else:
            at = self.burst_share + (within - in_bursts) / (1.0 - in_bursts) * (1.0 - self.burst_share)
        return (period + at) * self.period_s


def arrival_times(rate: float, duration_s: float, *, pattern: str, seed: int) -> list[float]:
    """Return the arrival times within a short duration, at a mean rate of `rate` per second.

    >>> arrival_times(2.0, 2.0, pattern="fixed", seed=0)
    [0.0, 0.5, 1.0, 1.5]
    >>> 80 < len(arrival_times(10.0, 10.0, pattern="poisson", seed=0)) < 120
    True
    """
    times = Arrivals(rate, pattern).times(seed)
    return list(itertools.takewhile(lambda time_s: time_s < duration_s, times))
