"""Scaling: decides when a set of engines gets one more, and when one fewer.

    the next request would wait for more than 2 s, for 10 s      one more
    engines were idle for 70 % of 5 minutes                      one fewer

The expected wait is the number of waiting prompt tokens divided by the recent rate of computing them, which counts only
time in which some waited. Nothing is decided while an engine starts or drains, and both periods start again with each
change. An engine is removed only if the others would then be busy for at most 60 % of their time, so that removing an
engine cannot cause the wait that adds one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from quire.core.setting_checks import require_int

MOST_WAIT_S: Final = 2.0
WAITS_FOR_S: Final = 10.0
LEAST_BUSY: Final = 0.3
IDLE_FOR_S: Final = 300.0
RATE_MEMORY_S: Final = 20.0
BUSY_MEMORY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a set of engines. `num_engines`: all its engines, including those that start or drain.

    `num_busy`: ready engines that have requests. `num_waiting_tokens`: prompt tokens that wait.
    `num_done_tokens`: prompt tokens that no longer wait, counted from the start.
    """

    num_engines: int
    num_ready: int
    num_busy: int
    num_waiting_tokens: int
    num_done_tokens: int


class Scaling:
    """Decides how many engines a set has, between two bounds. Call `look` about once a second.

    >>> scaling = Scaling(1, 4)
    >>> [scaling.look(second, Load(1, 1, 1, 5000, 100 * second)) for second in range(12)]
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    """

    def __init__(self, least: int, most: int) -> None:
        require_int("least", least, 1, most)
        self.least = least
        self.most = most
        self.wait_s = 0.0
        """How long the next request would wait, according to the last `look`."""
        self._looked_s: float | None = None
        self._last = Load(least, 0, 0, 0, 0)
        self._done = self._seconds = 0.0  # recent tokens and their time; older ones count less
        self._busy = 1.0
        self._waits_since_s: float | None = None
        self._idle_since_s: float | None = None

    def look(self, now_s: float, load: Load) -> int:
        """Return by how many engines the set should change: 1, 0 or -1. Mutates; O(1)."""
        self._learn(now_s, load)
        if load.num_engines < self.least:
            return self._change(1)
        if load.num_ready < load.num_engines:
            return self._change(0)
        self._waits_since_s = self._since(self._waits_since_s, now_s, is_so=self.wait_s > MOST_WAIT_S)
        is_idle = self._busy < LEAST_BUSY and self.wait_s <= MOST_WAIT_S
        self._idle_since_s = self._since(self._idle_since_s, now_s, is_so=is_idle)
        if self._lasted(self._waits_since_s, now_s, WAITS_FOR_S) and load.num_engines < self.most:
            return self._change(1)
        if self._lasted(self._idle_since_s, now_s, IDLE_FOR_S) and load.num_engines > self.least:
            return self._change(-1)
        return 0

    def _learn(self, now_s: float, load: Load) -> None:
        last, passed_s = self._last, 0.0 if self._looked_s is None else max(0.0, now_s - self._looked_s)
        if last.num_waiting_tokens:
            kept = math.exp(-passed_s / RATE_MEMORY_S)
            self._done = self._done * kept + load.num_done_tokens - last.num_done_tokens
            self._seconds = self._seconds * kept + RATE_MEMORY_S * (1.0 - kept)
        kept = math.exp(-passed_s / BUSY_MEMORY_S)
        self._busy = self._busy * kept + (1.0 - kept) * load.num_busy / max(1, load.num_ready)
        self.wait_s = load.num_waiting_tokens * self._seconds / (self._done + 1.0)
        self._looked_s, self._last = now_s, load

    def _change(self, change: int) -> int:
        self._waits_since_s = self._idle_since_s = None
        return change

    @staticmethod
    def _since(since_s: float | None, now_s: float, *, is_so: bool) -> float | None:
        return None if not is_so else now_s if since_s is None else since_s

    @staticmethod
    def _lasted(since_s: float | None, now_s: float, for_s: float) -> bool:
        return since_s is not None and now_s - since_s >= for_s
