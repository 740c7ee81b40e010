"""Timeline: where the memory and the queue stood over time, in a room that does not grow with the length of a run.

A point is taken every `interval_s` of its time. When there are too many, each two become one, their mean, and the
interval doubles: a run of minutes is seen by the second, one of hours by the half minute. To look costs as much as a
few steps, so after the first points at least 64 steps lie between two.

    time    ├─ step ─┼─ step ─┤  idle  ├────── step ──────┤
    point                     │                           │
                  stands for two steps        stands for one, however long

So points do not stand for equal times. Each says how long the steps took since the one before (`busy_s`), and counts
for so much in a mean: in `mean_over_time`, and where two points become one, which leaves the means what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

from quire.memory.ledger import MemoryLedger

MAX_POINTS = 512
FIRST_INTERVAL_S = 1.0
MAX_STRIDE = 64


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """The state around one moment, which stands for `busy_s` of steps. Counts are means over what was merged.

    The last three count from the beginning.
    """

    time_s: float
    busy_s: float
    running: float
    waiting: float
    used_blocks: float
    cached_blocks: float
    free_blocks: float
    stored_slots: float
    reserved_slots: float
    fragmented_slots: float
    saved_blocks: float
    preemptions: float
    queried_tokens: float
    hit_tokens: float

    @classmethod
    def of(cls, time_s: float, busy_s: float, counts: tuple[int, int, int], ledger: MemoryLedger) -> TimelinePoint:
        """Return the point of a ledger, and of how many sequences run, wait, and have yielded so far."""
        num_running, num_waiting, num_preemptions = counts
        return cls(
            time_s,
            busy_s,
            num_running,
            num_waiting,
            ledger.used_blocks,
            ledger.cached_blocks,
            ledger.free_blocks,
            ledger.stored_slots,
            ledger.reserved_slots,
            ledger.fragmented_slots,
            ledger.blocks_saved_by_sharing,
            num_preemptions,
            ledger.queried_tokens,
            ledger.hit_tokens,
        )


class Timeline:
    """Takes points as time goes on.

    >>> timeline = Timeline()
    >>> def look(now_s, busy_s): return TimelinePoint(now_s, busy_s, *[1.0] * 12)
    >>> for step in range(40000): timeline.advance(step * 0.02, 0.02, look)
    >>> len(timeline.points) <= MAX_POINTS, timeline.interval_s
    (True, 2.0)
    """

    def __init__(self, first_interval_s: float = FIRST_INTERVAL_S) -> None:
        self.points: list[TimelinePoint] = []
        self.interval_s = first_interval_s
        self._next_s = 0.0
        self._num_skipped = 0
        self._busy_s = 0.0  # since the last point

    def advance(self, now_s: float, step_s: float, look: Callable[[float, float], TimelinePoint]) -> None:
        """A step has ended that took so long: take a point if one is due. Mutates.

        Only then `look` is called, with the time, and for how long the point stands.
        """
        self._num_skipped += 1
        self._busy_s += step_s
        if now_s < self._next_s or self._num_skipped < min(len(self.points), MAX_STRIDE):
            return
        self.points.append(look(now_s, self._busy_s))
        self._num_skipped, self._busy_s = 0, 0.0
        if len(self.points) >= MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_merged(first, second) for first, second in pairs]
            self.interval_s *= 2
        self._next_s = (now_s // self.interval_s + 1) * self.interval_s


def mean_over_time(points: Sequence[TimelinePoint], measure: Callable[[TimelinePoint], float]) -> float:
    """Return the mean of what is measured of points over the time that they stand for; 0 of no time."""
    busy_s = sum(point.busy_s for point in points)
    return sum(measure(point) * point.busy_s for point in points) / busy_s if busy_s else 0.0


def _merged(first: TimelinePoint, second: TimelinePoint) -> TimelinePoint:
    busy_s = first.busy_s + second.busy_s
    share = second.busy_s / busy_s if busy_s else 0.5
    pairs = zip(astuple(first), astuple(second), strict=True)
    return replace(TimelinePoint(*(one + share * (other - one) for one, other in pairs)), busy_s=busy_s)
