"""Replica: keeps one engine running. It monitors the engine, kills it if it is silent for too long, and restarts it.

    start ──► starting ── Ready ──► ready ◄──► unresponsive (silent for 5 s)
                 ▲                    │             │ silent for too long: killed
                 └─── after a delay ──┴── it ends ◄─┘           each start begins a new epoch

An unreadable message or a missing update ends the epoch; duplicate updates are dropped. No message of an epoch is read
after its end, so an engine that was stopped and resumes late has no effect.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import Final, Protocol

from quire.core.clock import Clock
from quire.core.errors import ExecutionError, InvariantError
from quire.core.validate import RequestLimits
from quire.engine.client import SequenceUpdate
from quire.engine.commands import AnyCommand
from quire.engine.process.connection import EngineConnection, StartEngine
from quire.engine.process.heartbeat import BEAT_S, QUIET_S, Standstill
from quire.engine.process.messages import Beat, Blocks, Close, Failed, Live, Loaded, Ready, Stats, Updates
from quire.engine.records.live import LiveFrame
from quire.engine.records.report import EngineReport
from quire.engine.records.stats import EngineStats, ModelState
from quire.memory.cache_journal import CacheNews

logger = logging.getLogger("quire.engine")

FIRST_RESTART_S: Final = 0.1
LONGEST_RESTART_S: Final = 30.0
STAYS_UP_S: Final = 60.0
"""After this many seconds of running, an engine that ends is restarted after the shortest delay."""
MOST_FAILED_STARTS: Final = 5
CLOSING_S: Final = 10.0
LOADS: Final = (ModelState.STARTING, ModelState.RESTARTING)
"""The states of an engine that has a process but is not ready."""


class ReplicaOwner(Protocol):
    """Receives the events of a replica."""

    def note_loaded(self, replica: Replica, message: Loaded) -> None:
        """An engine reports its progress of loading."""
        ...

    def replica_ready(self, replica: Replica) -> None:
        """An engine takes requests."""
        ...

    def take_updates(self, replica: Replica, updates: list[SequenceUpdate]) -> None:
        """An engine has updates of requests."""
        ...

    def take_blocks(self, replica: Replica, news: CacheNews) -> None:
        """An engine reports changes of its prefix cache."""
        ...

    def take_live(self, replica: Replica, frame: LiveFrame) -> None:
        """An engine reports memory events."""
        ...

    def replica_changed(self, replica: Replica) -> None:
        """An engine has become silent, or responds again."""
        ...

    def replica_lost(self, replica: Replica, *, is_planned: bool) -> None:
        """An engine has ended, and its running requests are lost; `failure` is the cause."""
        ...


class Replica:
    """One engine of a set. `silence_s`: seconds of silence after which the engine is killed; None: no limit."""

    def __init__(
        self, index: int, start: StartEngine, owner: ReplicaOwner, clock: Clock, silence_s: float | None
    ) -> None:
        self.index = index
        self.state = ModelState.CLOSED  # until `begin`
        self.failure = ""  # why the engine is not running
        self.limits: RequestLimits | None = None  # known once it has been ready
        self.report: EngineReport | None = None
        self.fingerprint = ""
        self.stats = EngineStats()
        self.epoch = 0
        self.num_restarts = 0
        self.load_s = 0.0  # seconds from its first start until it was ready
        self._start = start
        self._owner = owner
        self._clock = clock
        self._silence_s = silence_s
        self._connection: EngineConnection | None = None
        self._reason = ""  # why the current engine will end, if known
        self._is_recycled = False  # the engine ends because of `recycle`
        self._num_heard = 0
        self._started_s = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        return self.state is ModelState.READY

    @property
    def process_id(self) -> int | None:
        """The id of the engine's process; None if it is not running or on another machine."""
        return self._connection.process_id if self._connection is not None and self.state.has_engine else None

    @property
    def connection(self) -> EngineConnection | None:
        """The connection to the engine; None without an engine."""
        return self._connection

    def begin(self) -> None:
        """Start the engine, and restart it whenever it ends, until `close`."""
        if self._task is not None:
            raise InvariantError("a replica can be started only once")
        self.state = ModelState.STARTING
        self._task = asyncio.create_task(self._supervise(), name=f"quire-replica-{self.index}")

    @property
    def is_in_use(self) -> bool:
        """Whether it is to have an engine; `begin` and `rest` change it."""
        return self._task is not None

    def send(self, command: AnyCommand) -> None:
        """Send a command to the engine; if it is not running, drop the command."""
        if self._connection is not None and self.state.has_engine:
            self._connection.send(command)

    def recycle(self) -> None:
        """End the engine cleanly and start another; calls `replica_lost` in between. Mutates."""
        if self._connection is not None:
            self._is_recycled = True
            self._connection.send(Close())

    async def close(self) -> None:
        """End the engine and do not restart it; kill it if it still loads. May be called twice."""
        if self.state in LOADS:
            self.kill()  # it reads no message before it has loaded
        self.state = ModelState.CLOSED
        if self._task is not None:
            if not self._task.cancelling():  # a second cancellation would interrupt its wait for the process
                self._task.cancel()
            await asyncio.wait([self._task])  # unlike `await`, raises `CancelledError` only for the caller

    def kill(self) -> None:
        """Kill the engine, and do not restart it; `close` must follow. Mutates."""
        self.state = ModelState.CLOSED
        if self._connection is not None:
            self._connection.kill()

    async def rest(self) -> None:
        """End the engine until `begin`. Mutates."""
        await self.close()
        self._task, self.stats = None, EngineStats()

    # ---- life cycle -------------------------------------------------------------------------------------------------

    async def _supervise(self) -> None:
        """Keep an engine running; return when it cannot be started."""
        delay_s, num_failed_starts = FIRST_RESTART_S, 0
        while num_failed_starts < MOST_FAILED_STARTS:
            self._is_recycled = False
            was_ready = await self._run_once()
            if self.state is ModelState.CLOSED:
                return
            if self.limits is None:
                break  # it was never ready, so another start would fail too
            self.num_restarts += 1
            if self._is_recycled and was_ready:
                continue
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            delay_s = FIRST_RESTART_S if self._clock.now() - self._started_s >= STAYS_UP_S else delay_s
            logger.error("replica %d: %s; restarting it in %g s", self.index, self.failure, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_RESTART_S)
        self._lose(ModelState.FAILED, self.failure)

    async def _run_once(self) -> bool:
        """Run one engine until it ends; return whether it was ready."""
        self._reason, self.epoch, self._started_s = "", self.epoch + 1, self._clock.now()
        try:
            connection = await self._start(self.index)
        except Exception as error:
            self._lose(ModelState.RESTARTING, f"the engine process: {_reason(error)}")
            return False
        self._connection = connection
        heart = asyncio.create_task(self._beat(connection))
        status, patience_s, was_ready = 0, CLOSING_S, False
        try:
            await self._listen(connection)
            patience_s = 1.0  # the connection has ended, so the process will end soon
        except Exception as error:
            self._reason = f"the engine process: {_reason(error)}"
            connection.kill()
        except asyncio.CancelledError:
            with suppress(ExecutionError):
                connection.send(Close())
            raise
        finally:
            was_ready, self._connection = self.state.has_engine, None
            heart.cancel()
            if was_ready:
                # It gets no more commands; why it ended is known once its process has.
                self.state, self.failure = ModelState.RESTARTING, self._reason or "the engine process is ending"
            ending = asyncio.ensure_future(connection.end(patience_s))
            try:
                status = await asyncio.shield(ending)
            except asyncio.CancelledError:  # by `close`, which must not return before the process has ended
                await asyncio.wait([ending])
                raise
            if self.state is not ModelState.CLOSED:
                self._lose(ModelState.RESTARTING, self._reason or f"the engine process has ended with status {status}")
        return was_ready

    async def _listen(self, connection: EngineConnection) -> None:
        """Receive an engine's messages until it ends."""
        owner, num_updates = self._owner, 0
        while (message := await connection.receive()) is not None:
            self._num_heard += 1
            if self.state is ModelState.UNRESPONSIVE:
                self.state, self.failure = ModelState.READY, ""
                owner.replica_changed(self)
            match message:
                case Updates(_, number):
                    if number > num_updates:
                        raise ExecutionError(f"updates {num_updates} to {number - 1} of the engine are missing")
                    if number == num_updates:
                        num_updates += 1
                        owner.take_updates(self, message.updates)
                case Stats(stats):
                    self.stats = stats
                case Blocks(news):
                    owner.take_blocks(self, news)
                case Live(frame):
                    owner.take_live(self, frame)
                case Loaded():
                    owner.note_loaded(self, message)
                case Ready(limits, report, fingerprint):
                    self.load_s = self.load_s or self._clock.now() - self._started_s
                    self.limits, self.report, self.fingerprint = limits, report, fingerprint
                    self.state, self.failure = ModelState.READY, ""
                    owner.replica_ready(self)
                case Failed(reason):
                    self._reason = reason

    async def _beat(self, connection: EngineConnection) -> None:
        """Send a beat once a second, and check that the engine is alive."""
        still = Standstill(self._clock)
        while True:
            await asyncio.sleep(BEAT_S)
            connection.send(Beat())
            self.judge(still.look(self._num_heard))

    def judge(self, silent_s: float) -> None:
        """Act on an engine's silence: mark it unresponsive, or kill it. A starting engine may be silent."""
        if self._connection is None or not self.state.has_engine:
            return
        if silent_s >= QUIET_S and self.is_ready:
            self.state, self.failure = ModelState.UNRESPONSIVE, f"the engine has been silent for {QUIET_S:g} s"
            logger.warning("replica %d: %s", self.index, self.failure)
            self._owner.replica_changed(self)
        if silent_s > (self._silence_s or math.inf):
            self._reason = f"the engine has been silent for {self._silence_s:g} s (max_silence_s)"
            self._connection.kill()

    def _lose(self, state: ModelState, message: str) -> None:
        self.state, self.failure = state, message
        self.stats = EngineStats()
        self._owner.replica_lost(self, is_planned=self._is_recycled and not self._reason)


def _reason(error: Exception) -> str:
    """Return why an engine ends. What is not foreseen is a bug, which must not end the supervision."""
    if isinstance(error, (OSError, ExecutionError)):
        return str(error)
    logger.error("the supervision of an engine failed", exc_info=error)
    return f"{type(error).__name__}: {error}"
