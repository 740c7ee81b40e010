"""Time, injected.

Nothing in the control plane reads the wall clock directly: the code that builds the engine passes in a `Clock`. The
product uses `SystemClock`; the simulator and the tests use `ManualClock`, which moves only when advanced, so that hours
of traffic run in seconds and a run can be repeated to the bit.
"""

from __future__ import annotations

import time
from typing import Protocol

from quire.core.errors import InvalidValueError


class Clock(Protocol):
    """Seconds since some fixed moment; never goes backwards."""

    def now(self) -> float:
        """Return the current time in seconds."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return the monotonic time in seconds."""
        return time.monotonic()


class ManualClock:
    """A clock that moves only when `advance` is called.

    >>> clock = ManualClock()
    >>> clock.advance(1.5)
    >>> clock.now()
    1.5
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        """Return the time that the clock was last moved to."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward by `seconds`. Mutates the clock."""
        if not seconds >= 0.0:
            raise InvalidValueError("seconds", seconds, "a number of seconds, 0 or more")
        self._now_s += seconds
