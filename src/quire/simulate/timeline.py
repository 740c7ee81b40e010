"""Timeline: where the memory and the queue stood over time, in a room that does not grow with the length of a run.

A point is taken every `interval_s` of its time. When there are too many, each two become one, their mean, and the
interval doubles: a run of minutes is seen by the second, one of hours by the half minute. To look costs as much as a
few steps, so after the first points at least 64 steps lie between two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass

from quire.memory.ledger import MemoryLedger

MAX_POINTS = 512
FIRST_INTERVAL_S = 1.0
MAX_STRIDE = 64


@dataclass(frozen=True, slots=True)
class TimelinePoint:
    """The state around one moment; counts are means over what was merged. The last three count from the beginning."""

    time_s: float
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
    def of(cls, time_s: float, counts: tuple[int, int, int], ledger: MemoryLedger) -> TimelinePoint:
        """Return the point of a ledger, and of how many sequences run, wait, and have yielded so far."""
        num_running, num_waiting, num_preemptions = counts
        return cls(
            time_s,
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
    >>> for step in range(40000): timeline.advance(step * 0.02, lambda now_s: TimelinePoint(now_s, *[1.0] * 12))
    >>> len(timeline.points) <= MAX_POINTS, timeline.interval_s
    (True, 2.0)
    """

    def __init__(self, first_interval_s: float = FIRST_INTERVAL_S) -> None:
        self.points: list[TimelinePoint] = []
        self.interval_s = first_interval_s
        self._next_s = 0.0
        self._num_skipped = 0

    def advance(self, now_s: float, look: Callable[[float], TimelinePoint]) -> None:
        """A step has ended: take a point if one is due. Mutates; `look` is called only then."""
        self._num_skipped += 1
        if now_s < self._next_s or self._num_skipped < min(len(self.points), MAX_STRIDE):
            return
        self._num_skipped = 0
        self.points.append(look(now_s))
        if len(self.points) >= MAX_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [_mean(first, second) for first, second in pairs]
            self.interval_s *= 2
        self._next_s = (now_s // self.interval_s + 1) * self.interval_s


def _mean(first: TimelinePoint, second: TimelinePoint) -> TimelinePoint:
    return TimelinePoint(*((one + other) / 2 for one, other in zip(astuple(first), astuple(second), strict=True)))
