"""Heartbeats: the server and the engine's process check that the other one is alive, and that steps end.

    server ── Beat, once a second ──► engine process      silent for max_silence_s: the engine ends itself
    server ◄── Beat, once a second ── engine process      silent for 5 s: not ready; for max_silence_s: killed
                                      a step of max_step_s: the engine reports it and ends itself

Beats come from their own thread, so neither an idle engine nor a long step is silent: a step computes without the
interpreter's lock. A silent process is stopped, or stuck in native code that holds that lock. A silent engine soon
counts as not ready, but is killed late: a debugger may have stopped it.

Silence is counted in checks, one per second, each at most two seconds. So time in which the checker itself did not run
does not count: a suspended machine, a frozen container, Ctrl-Z.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.core.clock import Clock

BEAT_S: Final = 1.0
QUIET_S: Final = 5.0
"""Seconds of silence after which an engine is not ready."""
MAX_STEP_S: Final = 300.0
MAX_SILENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Patience:
    """The time limits of a step, and of the silence of server and engine; None: no limit."""

    max_step_s: float | None = MAX_STEP_S
    max_silence_s: float | None = MAX_SILENCE_S


PATIENCE: Final = Patience()


class Standstill:
    """Measures how long a number that should change has stayed the same, with one check per beat.

    >>> from quire.core.clock import ManualClock
    >>> clock = ManualClock()
    >>> still = Standstill(clock)
    >>> still.look(7)
    0.0
    >>> clock.advance(1.0); still.look(7)
    1.0
    >>> clock.advance(3600.0); still.look(7)  # no checks in between
    3.0
    >>> still.look(8)
    0.0
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_s = clock.now()
        self._mark: int | None = None
        self._seconds = 0.0

    def look(self, mark: int | None) -> float:
        """Return the seconds for which `mark` has been the same; 0 if it is None. Mutates."""
        now = self._clock.now()
        passed_s = min(now - self._looked_s, 2 * BEAT_S)
        self._seconds = 0.0 if mark is None or mark != self._mark else self._seconds + passed_s
        self._looked_s, self._mark = now, mark
        return self._seconds


class Heart:
    """Calls `beat` once a second, in its own thread, until it is stopped."""

    def __init__(self, beat: Callable[[], None]) -> None:
        self._beat = beat
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-heart", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop beating. May be called twice."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(BEAT_S):
            self._beat()
