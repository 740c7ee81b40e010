"""EngineThread: an engine client at work in a thread of its own.

    any thread ── add, abort, stop ──► queue ──► engine thread: commands, then one step ──► deliver(updates)

With nothing under way the thread sleeps on the queue, so a request wakes it at once and an idle engine costs nothing.
Commands are carried out between steps: what is aborted has given its blocks back before the next step is planned. A
request with a grammar waits until that is compiled, in a thread beside, and so does whatever is said of it: no step
waits for a grammar, and the order of commands for one request stays what it was. An exception out of the engine ends
the thread, and `fail` is told why: nobody is left waiting.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from quire.core.clock import Clock
from quire.core.errors import QuireError
from quire.core.grammar import Grammar, GrammarChecker
from quire.engine.client import EngineClient, EngineRequest, SequenceUpdate, refused
from quire.engine.live import ShowLive
from quire.engine.stats import EngineStats

logger = logging.getLogger("quire.engine")

STATS_EVERY_S: Final = 0.1
Command = Callable[[EngineClient], None]


class EngineThread:
    """Owns a client; `deliver`, `fail` and `tell` are called from its thread.

    `tell` gets the counters of the engine: before the thread sleeps, and otherwise ten times a second. `grammars` None:
    no request has one.
    """

    def __init__(
        self,
        client: EngineClient,
        deliver: Callable[[list[SequenceUpdate]], None],
        fail: Callable[[str], None],
        tell: Callable[[EngineStats], None],
        clock: Clock,
        *,
        grammars: GrammarChecker | None = None,
    ) -> None:
        self._client = client
        self._deliver = deliver
        self._on_failure = fail
        self._tell = tell
        self._clock = clock
        self._next_stats_s = 0.0
        self._turn: int | None = None  # the step at hand, with the commands before it
        self._num_turns = 0
        self._watched: tuple[float, ShowLive] | None = None  # seconds between frames, and who is shown them
        self._next_frame_s = 0.0
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._grammars = grammars
        self._held: dict[str, list[Command]] = {}  # by request: what waits for its grammar
        self._holding = threading.Lock()
        self._compiler = ThreadPoolExecutor(1, "quire-grammar")  # its thread starts with the first grammar
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._thread.start()

    @property
    def turn(self) -> int | None:
        """A number that is another one with each step; None while there is nothing to do. Read from any thread."""
        return self._turn

    @property
    def stack(self) -> str:
        """Where the thread is, for the log."""
        found = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(found)) if found else "its thread has ended"

    def add(self, request: EngineRequest) -> None:
        """Have a request taken in; if it is refused after all, its sequences end with an error."""
        grammar = request.sampling.grammar
        if grammar is not None and self._grammars is not None:
            with self._holding:
                self._held[request.request_id] = []
            self._compiler.submit(self._prepare, self._grammars, request.request_id, grammar, self._adding(request))
        else:
            self._commands.put(self._adding(request))

    def abort(self, request_id: str) -> None:
        """Have a request ended."""
        self._say(request_id, lambda client: client.abort(request_id))

    def fail(self, request_id: str, message: str) -> None:
        """Have a request ended with an error."""
        self._say(request_id, lambda client: client.fail(request_id, message))

    def stop(self, request_id: str, branch: int) -> None:
        """Have a sequence ended."""
        self._say(request_id, lambda client: client.stop(request_id, branch))

    def watch(self, every_s: float, show: ShowLive) -> None:
        """Have `show` called, in the engine's thread, with what happens, at most once in so many seconds.

        Begins anew where it is done already.
        """
        self._commands.put(lambda client: self._watch(client, (every_s, show)))

    def unwatch(self) -> None:
        """Have nothing shown any more."""
        self._commands.put(self._unwatch)

    def close(self) -> None:
        """End the thread after the step that it is in, and close the client. May be called twice."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._commands.put(None)
        self._thread.join()

    def _adding(self, request: EngineRequest) -> Command:
        return lambda client: self._add(client, request)

    def _say(self, request_id: str, command: Command) -> None:
        """Have a command carried out, after the request that it is about has been taken in."""
        with self._holding:
            if request_id in self._held:
                self._held[request_id].append(command)
            else:
                self._commands.put(command)

    def _prepare(self, grammars: GrammarChecker, request_id: str, grammar: Grammar, adding: Command) -> None:
        """Compile a grammar, then let go what waits for it; called in the thread beside."""
        try:
            grammars.prepare(grammar)
        except QuireError as error:  # the door has checked it, so the worker will fail the row, and say why
            logger.warning("a grammar that was checked could not be compiled: %s", error)
        finally:
            with self._holding:
                for command in [adding, *self._held.pop(request_id)]:
                    self._commands.put(command)

    def _run(self) -> None:
        try:
            while self._obey():
                self._begin_turn()
                updates = self._client.receive()
                if updates:
                    self._deliver(updates)
                if self._clock.now() >= self._next_stats_s:
                    self._tell_stats()
                if self._seconds_to_frame() == 0.0:
                    self._show_frame()
        except BaseException as error:
            logger.exception("the engine has failed")
            self._on_failure(f"the engine has failed: {type(error).__name__}: {error}")
        finally:
            self._client.close()

    def _obey(self) -> bool:
        """Carry out the commands that have come, waiting for one while nothing is under way; False: it is over."""
        while True:
            if self._client.is_idle and self._commands.empty():
                self._tell_stats()
            try:
                self._turn = None if self._client.is_idle else self._turn
                command = self._commands.get(self._client.is_idle, self._seconds_to_frame())
            except queue.Empty:
                if not self._client.is_idle:
                    return True
                self._show_frame()
                continue
            if command is None:
                return False
            self._begin_turn()
            command(self._client)

    def _begin_turn(self) -> None:
        self._num_turns += 1
        self._turn = self._num_turns

    def _tell_stats(self) -> None:
        self._next_stats_s = self._clock.now() + STATS_EVERY_S
        self._tell(self._client.stats())

    def _watch(self, client: EngineClient, watched: tuple[float, ShowLive]) -> None:
        self._watched, self._next_frame_s = watched, 0.0
        client.watch()

    def _unwatch(self, client: EngineClient) -> None:
        self._watched = None
        client.unwatch()

    def _seconds_to_frame(self) -> float | None:
        """How long it is until something is to be shown; None: there is nothing that could be."""
        if self._watched is None or not self._client.has_news:
            return None
        return max(self._next_frame_s - self._clock.now(), 0.0)

    def _show_frame(self) -> None:
        frame = self._client.live()
        if frame is not None and self._watched is not None:
            every_s, show = self._watched
            self._next_frame_s = self._clock.now() + (every_s if frame.is_whole else 0.0)
            show(frame)

    def _add(self, client: EngineClient, request: EngineRequest) -> None:
        try:
            client.add(request)
        except QuireError as error:
            self._deliver(refused(request, str(error)))
