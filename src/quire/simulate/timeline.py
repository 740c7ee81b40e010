"""Timeline: the memory and the queue over time, in bounded space.

A point is taken every `interval_s` of simulated time. When there are too many, each pair is merged into its mean, and
the interval doubles: a run of minutes has a point per second, one of hours a point per half minute. Taking a point
takes as long as a few steps, so after the first points at least 64 steps separate them.

    time    ├─ step ─┼─ step ─┤  idle  ├────── step ──────┤
    point                     │                           │
                  stands for two steps        stands for one, however long

So points do not stand for equal times. Each has the time of the steps since the previous one (`busy_s`), which is its
weight in a mean: in `mean_over_time`, and when two points are merged, which does not change the means.
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
    """The state at one moment, which stands for `busy_s` of steps. Counts are means over merged points.

    The last three count from the beginning of the run.
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
        """Return a point; `counts`: running sequences, waiting sequences, and preemptions so far."""
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
    """Takes points as time passes.

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
        """Note the end of a step of `step_s`, and take a point if one is due. Mutates.

        Only then `look` is called, with the time, and with the time of steps that the point stands for.
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
    """Return the mean of a measure of points, weighted by the time that they stand for; 0 without time."""
    busy_s = sum(point.busy_s for point in points)
    return sum(measure(point) * point.busy_s for point in points) / busy_s if busy_s else 0.0


def _merged(first: TimelinePoint, second: TimelinePoint) -> TimelinePoint:
    busy_s = first.busy_s + second.busy_s
    share = second.busy_s / busy_s if busy_s else 0.5
    pairs = zip(astuple(first), astuple(second), strict=True)
    return replace(TimelinePoint(*(one + share * (other - one) for one, other in pairs)), busy_s=busy_s)
