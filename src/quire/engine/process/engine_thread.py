"""EngineThread: runs an engine client in its own thread.

    any thread ── send ──► queue ──► engine thread: commands, then one step ──► EngineCallbacks

Without requests the thread sleeps on the queue, so a request wakes it at once and an idle engine uses no CPU. While
blocks are being written to the disk, it polls the disk now and then, so that the remaining blocks follow.
Commands take effect between steps: an aborted request frees its blocks before the next step is planned. An exception
from the engine ends the thread and calls `fail` with the reason, so that no caller waits forever.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from quire.core.clock import Clock
from quire.core.errors import QuireError
from quire.engine.client import EngineClient, SequenceUpdate, refused
from quire.engine.commands import Add, AnyCommand, AskDisk, Watch
from quire.engine.records.live import ShowLive
from quire.engine.records.stats import EngineStats
from quire.memory.cache_journal import CacheNews

logger = logging.getLogger("quire.engine")

STATS_EVERY_S: Final = 0.1


def ignore_news(news: CacheNews) -> None:
    """Ignore a report of cache changes: no router reads it."""


@dataclass(frozen=True, slots=True)
class EngineCallbacks:
    """The callbacks of an `EngineThread`, which it calls in its own thread.

    `tell` receives the engine's counters: before the thread sleeps, and otherwise ten times a second. `show` receives
    memory events, while a `Watch` is active. `report` receives changes of the prefix cache, after a `Survey`, before
    the updates of the step that caused them.
    """

    deliver: Callable[[list[SequenceUpdate]], None]
    fail: Callable[[str], None]
    tell: Callable[[EngineStats], None]
    show: ShowLive
    report: Callable[[CacheNews], None] = ignore_news


class EngineThread:
    """Steps the engine of a client and passes the results of each step to callbacks."""

    def __init__(self, client: EngineClient, callbacks: EngineCallbacks, clock: Clock) -> None:
        self._client = client
        self._callbacks = callbacks
        self._clock = clock
        self._next_stats_s = 0.0
        self._turn: int | None = None  # the current step or command
        self._num_turns = 0
        self._every_s: float | None = None  # seconds between frames; None: no reader
        self._next_frame_s = 0.0
        self._commands: queue.SimpleQueue[AnyCommand | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def turn(self) -> int | None:
        """A number that changes with each step and command; None while there is nothing to do. Read from any thread."""
        return self._turn

    @property
    def stack(self) -> str:
        """The thread's stack trace, for the log."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)) if frame else "its thread has ended"

    def send(self, command: AnyCommand) -> None:
        """Queue a command, to take effect before the next step; from any thread."""
        self._commands.put(command)

    def close(self) -> None:
        """End the thread after its current step, and close the client. May be called twice."""
        self._commands.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                self._begin_turn()
                updates = self._client.receive()
                self._report()
                if updates:
                    self._callbacks.deliver(updates)
                if self._clock.now() >= self._next_stats_s:
                    self._tell_stats()
                if self._seconds_to_frame() == 0.0:
                    self._show_frame()
        except BaseException as error:
            logger.exception("the engine has failed")
            self._callbacks.fail(f"the engine has failed: {type(error).__name__}: {error}")
        finally:
            self._client.close()

    def _obey(self) -> bool:
        """Carry out the queued commands, waiting for one if there are no requests; return False to end the thread."""
        while True:
            if self._client.is_idle:
                self._report()
                if self._commands.empty():
                    self._tell_stats()
            try:
                self._turn = None if self._client.is_idle else self._turn
                command = self._commands.get(self._client.is_idle, self._seconds_to_wait())
            except queue.Empty:
                if not self._client.is_idle:
                    return True
                if self._client.has_cache_news:
                    continue
                if self._client.ask_s is not None:
                    self._carry_out(AskDisk())
                if self._seconds_to_frame() == 0.0:
                    self._show_frame()
                continue
            if command is None:
                return False
            self._begin_turn()
            self._carry_out(command)

    def _begin_turn(self) -> None:
        self._num_turns += 1
        self._turn = self._num_turns

    def _tell_stats(self) -> None:
        self._next_stats_s = self._clock.now() + STATS_EVERY_S
        self._callbacks.tell(self._client.stats())

    def _report(self) -> None:
        news = self._client.take_cache_news()
        if news is not None:
            self._callbacks.report(news)

    def _carry_out(self, command: AnyCommand) -> None:
        if isinstance(command, Watch):
            self._every_s, self._next_frame_s = command.every_s, 0.0
        try:
            self._client.send(command)
        except QuireError as error:
            if not isinstance(command, Add):
                raise
            self._callbacks.deliver(refused(command, str(error)))

    def _seconds_to_wait(self) -> float | None:
        """Return the seconds until an idle engine has something to do; None: it has nothing to do."""
        if self._client.has_cache_news:
            return 0.0
        waits = [wait for wait in (self._seconds_to_frame(), self._client.ask_s) if wait is not None]
        return min(waits, default=None)

    def _seconds_to_frame(self) -> float | None:
        """Return the seconds until the next frame is due; None: no frame."""
        if self._every_s is None or not self._client.has_news:
            return None
        return max(self._next_frame_s - self._clock.now(), 0.0)

    def _show_frame(self) -> None:
        frame = self._client.live()
        if frame is not None and self._every_s is not None:
            self._next_frame_s = self._clock.now() + (self._every_s if frame.is_whole else 0.0)
            self._callbacks.show(frame)
