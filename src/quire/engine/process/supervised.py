"""SupervisedLLM: a model in a separate process, which is restarted when it dies.

    event loop: Door, RequestStreams ──── messages ────► engine process: scheduler, memory, model
                      ▲                                       │
                      └──────── updates, stats ◄──────────────┘

A server must answer while the model computes, and survive its crash. So everything about text stays here, and code that
may run out of memory or crash runs there. When the process ends, or is silent for too long (`heartbeat`), its requests
end with `ExecutionError`, and a new process starts: at once at first, then with growing delays while it does not stay
up. Meanwhile `state` shows that. Settings are checked here before any process is started.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import subprocess
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Final

from quire.core.adapters import AdapterFacts
from quire.core.clock import Clock, SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, InvariantError
from quire.core.executor import NoteLoaded
from quire.core.python_process import start_python
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import Add, AnyCommand, Command, OperatorVerbs, Watch
from quire.engine.door import NO_TICKET, TEXT_THREADS, Door, OpenModel, Ticket
from quire.engine.outputs import RequestDelta
from quire.engine.process.heartbeat import BEAT_S, PATIENCE, QUIET_S, Patience, Standstill
from quire.engine.process.messages import (
    LENGTH_BYTES,
    Beat,
    Close,
    Configure,
    Failed,
    FromEngine,
    Live,
    Loaded,
    Message,
    Ready,
    Stats,
    Updates,
    body_length,
    encode_message,
    message_from_engine,
)
from quire.engine.process.ownership import Home
from quire.engine.records.live import ShowLive
from quire.engine.records.report import EngineReport
from quire.engine.records.stats import EngineStats, ModelState
from quire.engine.streams import RequestStreams
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import ChatOptions, Prompt
from quire.engine.text.tenant_pool import TenantPool

if TYPE_CHECKING:
    from quire.engine.factory import EngineBlueprint

logger = logging.getLogger("quire.engine")

FIRST_RESTART_S: Final = 0.1
LONGEST_RESTART_S: Final = 30.0
STAYS_UP_S: Final = 60.0
"""An engine that was up for this long is restarted at once."""
MOST_FAILED_STARTS: Final = 5
CLOSING_S: Final = 10.0
LOOK_S: Final = 0.01
MAX_WAITING_TEXTS: Final = 256
"""Long texts of one tenant that may wait for a thread."""


def server_text_pool() -> TenantPool:
    """Return the threads for long texts of a server, which all its models share."""
    return TenantPool("quire-text", num_threads=TEXT_THREADS, max_waiting=MAX_WAITING_TEXTS)


class EngineProcess:
    """One engine process and the connection to it."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._home = Home()

    @classmethod
    async def start(cls, config: EngineConfig, patience: Patience, hash_key: bytes = b"") -> EngineProcess:
        """Start a process that builds the engine of some settings. `hash_key`: as in `Configure`."""
        ours, theirs = socket.socketpair()
        try:
            arguments = ("-m", "quire.engine.process.engine_host", str(theirs.fileno()))
            process = start_python(*arguments, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        started = cls(process, *await asyncio.open_connection(sock=ours))
        started.send(Configure(config, patience, hash_key))
        return started

    @property
    def process_id(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Message | Command) -> None:
        """Send a message; if the engine is gone, the message is lost."""
        self._home.require()  # a forked process has its parent's connection
        self._writer.write(encode_message(message))

    async def receive(self) -> FromEngine | None:
        """Wait for a message; None when the engine is gone."""
        try:
            head = await self._reader.readexactly(LENGTH_BYTES)
            return message_from_engine(await self._reader.readexactly(body_length(head)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def end(self, patience_s: float) -> int:
        """Wait this long for the process to end, then kill it; return its exit status. Does nothing after a fork."""
        if not self._home.is_here:
            return 0
        self._writer.close()
        try:
            async with asyncio.timeout(patience_s):
                return await self._ended()
        except TimeoutError:
            self._process.kill()
            return await self._ended()

    async def _ended(self) -> int:
        """Poll for the exit status: a thread to wait in might be busy when it matters."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(LOOK_S)
        return status

    def kill(self) -> None:
        """End the process by force."""
        self._process.kill()


class EngineMessages:
    """The `EngineLink` of a supervised engine: calls become messages to the present process."""

    def __init__(self) -> None:
        self.process: EngineProcess | None = None

    def send(self, command: AnyCommand) -> None:
        """Send a command; raises `ExecutionError` for a request if there is no engine."""
        if self.process is not None:
            self.process.send(command)
        elif isinstance(command, Add):  # other commands concern requests that ended with the engine
            raise ExecutionError("the engine is not running")


class SupervisedLLM(OpenModel, OperatorVerbs):
    """A model in a separate process, for the tasks of one event loop. Implements `quire.serve.model.ServedModel`.

    Bad settings raise at once. `start` starts the engine and returns; `wait_ready` waits until it takes requests.
    `text_pool`: the threads that it shares with other models; None: threads of its own. `blueprint`: the plan of these
    settings, where it was made already.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        patience: Patience = PATIENCE,
        clock: Clock | None = None,
        note_loaded: NoteLoaded | None = None,
        text_pool: TenantPool | None = None,
        blueprint: EngineBlueprint | None = None,
    ) -> None:
        from quire.engine.factory import plan_engine  # imported late, because it imports numpy

        super().__init__(Door(blueprint or plan_engine(config), text_pool=text_pool))
        self._report = self._door.report
        self._clock = clock or SystemClock()
        self._note_loaded = note_loaded
        self._link = EngineMessages()
        self._streams = RequestStreams(self._link, self._door.tokenizer, self._clock, self._door.condemn)
        self._streams.hold_adapters(self._door.adapters, self.stats)
        self._home = Home()
        self._limits: RequestLimits | None = None
        self._stats = EngineStats()
        self._state = ModelState.STARTING
        self._failure = ""  # why the engine is not running
        self._reason = ""  # why the present process is about to end, if known
        self._settled = asyncio.Event()  # ready for the first time, or failed for good
        self._num_heard = 0
        self._patience = patience
        self._num_restarts = 0
        self._supervisor: asyncio.Task[None] | None = None
        self._watched: tuple[float, ShowLive] | None = None  # how often, and the receiver of frames

    # ---- for callers ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        """The state of the engine; it takes requests only while it is ready."""
        return self._state

    @property
    def report(self) -> EngineReport:
        """The start-up table: as planned here, and once the engine is ready, with its own memory plan."""
        return self._report

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests; known once the engine has been ready."""
        if self._limits is None:
            raise ExecutionError(self._failure or "the model is still being loaded")
        return self._limits

    def stats(self) -> EngineStats:
        """Return the engine's last counts, and the number of restarts. Does not mutate."""
        return replace(self._stats, restarts_total=self._num_restarts)

    @property
    def failure(self) -> str:
        """Why the engine is not running; empty while it is."""
        return self._failure

    @property
    def engine_process_id(self) -> int | None:
        """The id of the engine's process; None while there is none."""
        return None if self._link.process is None else self._link.process.process_id

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        ticket: Ticket = NO_TICKET,
        *,
        chat: ChatOptions | None = None,
    ) -> PreparedRequest:
        """Return a request that the engine can serve; raises `InvalidRequestError` if it cannot."""
        return await self._door.prepare_beside(prompt, self.limits, sampling, ticket, chat)

    def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a request; yield its new parts after each step. Closing the iterator ends the request."""
        if self._state is not ModelState.READY:
            raise ExecutionError(self._failure or "the model is still being loaded")
        return self._streams.deltas(prepared)

    def watch(self, every_s: float, show: ShowLive) -> None:
        """Call `show` with memory events, at most once per `every_s` seconds.

        The first frames describe the present state, also after a restart of the engine. Mutates.
        """
        self._watched = (every_s, show)
        self._link.send(Watch(every_s))

    def unwatch(self) -> None:
        """Stop showing memory events. Mutates."""
        self._watched = None
        self._link.send(Watch(None))

    def send(self, command: AnyCommand) -> None:
        """Send a command, which takes effect before the next step; without an engine, drop it. Mutates."""
        self._link.send(command)

    async def load_adapter(self, name: str, folder: str) -> AdapterFacts:
        """Load the adapter in a folder while steps run, and give it a name; raises for one that does not fit."""
        return await self._door.adapters.load(name, folder, self.send, self.stats)

    def unload_adapter(self, name: str) -> None:
        """Take the name of an adapter away; requests that have it go on. Mutates."""
        self._door.adapters.unload(name, self.send)

    # ---- the process ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engine, and again whenever it ends, until `close`."""
        if self._supervisor is not None:
            raise InvariantError("a supervised engine can be started only once")
        self._supervisor = asyncio.create_task(self._supervise(), name="quire-supervisor")

    async def wait_ready(self) -> None:
        """Wait until the engine takes requests for the first time; raises `ExecutionError` if it cannot be built."""
        await self._settled.wait()
        if self._state is ModelState.FAILED:
            raise ExecutionError(self._failure)

    async def close(self) -> None:
        """End all requests and the process. May be called twice; later requests are refused.

        Does nothing in a forked process.
        """
        if not self._home.is_here:
            return
        self._lose(ModelState.CLOSED, "the engine is closed")
        if self._supervisor is not None:
            if not self._supervisor.cancelling():  # a second time would cut short its wait for the process
                self._supervisor.cancel()
            await asyncio.wait([self._supervisor])  # which, unlike `await`, tells whose end a `CancelledError` means
        self._settled.set()
        self._door.close()

    async def __aenter__(self) -> SupervisedLLM:
        self.start()
        await self.wait_ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _supervise(self) -> None:
        """Keep an engine running; returns when it cannot be built."""
        delay_s, num_failed_starts = FIRST_RESTART_S, 0
        while num_failed_starts < MOST_FAILED_STARTS:
            started_s, was_ready = self._clock.now(), False
            try:
                was_ready = await self._run_once()
            except (OSError, ExecutionError) as error:  # no process could be started, or it sent an invalid message
                self._lose(ModelState.RESTARTING, f"the engine process: {error}")
            if self._limits is None:
                break  # it was never ready, so it would fail again
            num_failed_starts = 0 if was_ready else num_failed_starts + 1
            delay_s = FIRST_RESTART_S if self._clock.now() - started_s >= STAYS_UP_S else delay_s
            logger.error("%s; restarting it in %g s", self._failure, delay_s)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LONGEST_RESTART_S)
            self._num_restarts += 1
        self._lose(ModelState.FAILED, self._failure)
        self._settled.set()

    async def _run_once(self) -> bool:
        """Run one engine process until it is gone; returns whether it was ready."""
        self._reason = ""
        process = await EngineProcess.start(self.config, self._patience)
        heart = asyncio.create_task(self._beat(process))
        status, patience_s = 0, CLOSING_S
        try:
            await self._listen(process)
            patience_s = 1.0  # the connection has ended, so the process will soon
        except asyncio.CancelledError:
            process.send(Close())
            raise
        finally:
            was_ready = self._link.process is process
            self._link.process = None
            heart.cancel()
            status = await asyncio.shield(process.end(patience_s))
            if self._state is not ModelState.CLOSED:
                self._lose(ModelState.RESTARTING, self._reason or f"the engine process has ended with status {status}")
        return was_ready

    async def _listen(self, process: EngineProcess) -> None:
        """Receive an engine's messages until it is gone."""
        while (message := await process.receive()) is not None:
            self._num_heard += 1
            if self._state is ModelState.UNRESPONSIVE:
                self._state, self._failure = ModelState.READY, ""
            match message:
                case Updates():
                    self._streams.process(message.updates)
                case Stats(stats):
                    self._stats = stats
                case Live(live_frame):
                    if self._watched is not None:
                        self._watched[1](live_frame)
                case Loaded(count, total, what):
                    if self._note_loaded is not None:
                        self._note_loaded(count, total, what)
                case Ready(limits, report):
                    self._limits, self._report = limits, report
                    self._link.process, self._state, self._failure = process, ModelState.READY, ""
                    self._settled.set()
                    self._door.adapters.restore(self._link.send)
                    if self._watched is not None:
                        self._link.send(Watch(self._watched[0]))
                case Failed(reason):
                    self._reason = reason

    async def _beat(self, process: EngineProcess) -> None:
        """Send a beat once a second, and check that the engine is alive."""
        still = Standstill(self._clock)
        while True:
            await asyncio.sleep(BEAT_S)
            process.send(Beat())
            self._judge(process, still.look(self._num_heard))

    def _judge(self, process: EngineProcess, silent_s: float) -> None:
        """Judge an engine that has been silent for some time. During its start it may be: it imports libraries."""
        if self._link.process is not process:
            return
        if silent_s >= QUIET_S and self._state is ModelState.READY:
            self._state, self._failure = ModelState.UNRESPONSIVE, f"the engine has been silent for {QUIET_S:g} s"
            logger.warning("%s", self._failure)
        if silent_s > (self._patience.max_silence_s or math.inf):
            self._reason = f"the engine has been silent for {self._patience.max_silence_s:g} s (max_silence_s)"
            process.kill()

    def _lose(self, state: ModelState, message: str) -> None:
        self._state, self._failure = state, message
        self._stats = EngineStats()
        self._streams.lose(message)
