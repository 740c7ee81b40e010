"""LiveHistory: the last minutes of a server, so that an operator's charts do not start empty.

    note_tokens, note_first_token, note_gap ──► the row of this second ──► rows ──► the first line of a reader

A second without computed tokens has no row. Memory is bounded: five minutes, and a few latencies per second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from quire.core.clock import Clock
from quire.engine.records.stats import EngineStats

SECONDS: Final = 300
MOST_SAMPLES: Final = 64
"""Latencies kept per second and kind: the last ones."""

HistoryRow = list[float | None]


@dataclass(slots=True)
class Second:
    """The counts of one second; `stats` are from its beginning."""

    number: int
    stats: EngineStats
    num_prompt: int = 0
    num_generated: int = 0
    first_tokens_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))


class LiveHistory:
    """The rows of the last five minutes. Use it in one event loop."""

    def __init__(self, clock: Clock, stats: Callable[[], EngineStats]) -> None:
        self._clock = clock
        self._stats = stats
        self._seconds: deque[Second] = deque(maxlen=SECONDS)

    def note_tokens(self, num_prompt: int, num_generated: int) -> None:
        """Add computed tokens. Mutates."""
        second = self._second()
        second.num_prompt += num_prompt
        second.num_generated += num_generated

    def note_first_token(self, seconds: float) -> None:
        """Add a time to first token. Mutates."""
        self._second().first_tokens_s.append(seconds)

    def note_gap(self, seconds: float) -> None:
        """Add the time between two pieces of a text. Mutates."""
        self._second().gaps_s.append(seconds)

    def rows(self) -> list[HistoryRow]:
        """Return a row for each second, the oldest first. Does not mutate.

        A row has its age in seconds; blocks used and cached at its end; generated tokens and prompt tokens; the share
        of looked-up tokens that hit; the median and 95th percentile of times to first token and of gaps, both in
        milliseconds.
        """
        now_s = self._clock.now()
        seconds = [second for second in self._seconds if second.number >= now_s - SECONDS]
        end = Second(int(now_s), self._stats())
        return [_row(second, later.stats, now_s) for second, later in pairwise([*seconds, end])]

    def _second(self) -> Second:
        number = int(self._clock.now())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(Second(number, self._stats()))
        return self._seconds[-1]


def _row(second: Second, later: EngineStats, now_s: float) -> HistoryRow:
    stats = second.stats
    queried = later.queried_tokens_total - stats.queried_tokens_total
    hit = later.hit_tokens_total - stats.hit_tokens_total
    return [
        round(now_s - second.number, 3),
        later.num_used_blocks,
        later.num_cached_blocks,
        second.num_generated,
        second.num_prompt,
        round(hit / queried, 4) if queried > 0 else None,
        *(_milliseconds(second.first_tokens_s, share) for share in (0.5, 0.95)),
        *(_milliseconds(second.gaps_s, share) for share in (0.5, 0.95)),
    ]


def _milliseconds(seconds: deque[float], share: float) -> float | None:
    """Return a quantile, or None if there are no values."""
    if not seconds:
        return None
    return round(1000 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))], 1)
