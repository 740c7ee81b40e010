"""SupervisedLLM: a model whose engines are separate processes, which are restarted when they die.

    event loop: Door, RequestStreams ──► ReplicaSet ──── messages ────► engine processes: scheduler, memory, model
                      ▲                                                     │
                      └─────────────── updates, stats ◄─────────────────────┘

A server must answer while the model computes, and survive its crash. So all work on text is done in this process, and
code that can run out of memory or crash runs in the others. When a process ends, or is silent for too long
(`heartbeat`), a new one starts: soon the first time, then with growing delays while it does not stay up. Its requests
continue in another engine, or in the new one. Settings are checked here before any process is started.
"""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from quire.core.adapters import AdapterFacts
from quire.core.clock import Clock, SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.executor import NoteLoaded
from quire.core.request import CacheScope
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import AnyCommand, OperatorVerbs
from quire.engine.door import NO_TICKET, TEXT_THREADS, Door, OpenModel, Ticket
from quire.engine.outputs import RequestDelta
from quire.engine.process.connection import EngineConnection
from quire.engine.process.messages import Configure
from quire.engine.process.ownership import Home
from quire.engine.process.waiting_host import WaitingHost
from quire.engine.records.live import ShowLive
from quire.engine.records.report import EngineReport
from quire.engine.records.stats import EngineStats, ModelState
from quire.engine.replicas.replica import Replica
from quire.engine.replicas.replica_set import ReplicaSet
from quire.engine.replicas.settings import ONE_REPLICA, ReplicaSettings
from quire.engine.replicas.shares import environment_of
from quire.engine.streams import RequestStreams
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import Prompt
from quire.engine.text.tenant_pool import TenantPool
from quire.routing.router import LEAST_LOADED, LEAST_WORK, Router

if TYPE_CHECKING:
    from quire.engine.factory import EngineBlueprint

MAX_WAITING_TEXTS: Final = 256
"""The most long texts per tenant that can wait for a thread."""


def server_text_pool() -> TenantPool:
    """Return the threads for long texts that all models of a server share."""
    return TenantPool("quire-text", num_threads=TEXT_THREADS, max_waiting=MAX_WAITING_TEXTS)


class SupervisedLLM(OpenModel, OperatorVerbs):
    """A model in separate processes, for the tasks of one event loop. Implements `quire.serve.model.ServedModel`.

    Bad settings raise at once. `start` starts the engines and returns; `wait_ready` waits until one takes requests.
    `config` is that of each engine. `text_pool`: threads shared with other models; None: its own threads. `blueprint`:
    the plan of these settings, if it exists already.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        replicas: ReplicaSettings = ONE_REPLICA,
        clock: Clock | None = None,
        note_loaded: NoteLoaded | None = None,
        text_pool: TenantPool | None = None,
        blueprint: EngineBlueprint | None = None,
    ) -> None:
        from quire.engine.factory import plan_engine  # imported late, because it imports numpy

        super().__init__(Door(blueprint or plan_engine(config), text_pool=text_pool))
        self._settings = replicas
        hash_key = secrets.token_bytes(32)
        self._set = ReplicaSet(
            partial(_start_engine, self.config, replicas, hash_key),
            replicas,
            Router(self.config.block_size, hash_key, LEAST_WORK if replicas.num_replicas > 1 else LEAST_LOADED),
            clock or SystemClock(),
            note_loaded=note_loaded,
            note_ready=self._note_ready,
        )
        self._streams = RequestStreams(self._set, self._door.tokenizer, clock or SystemClock(), self._door.condemn)
        self._streams.hold_adapters(self._door.adapters, self._set.stats)
        self._set.serve(self._streams)
        self._home = Home()
        self._report = replicas.shown_in(self._door.report)
        self._limits: RequestLimits | None = None

    # ---- for callers ------------------------------------------------------------------------------------------------

    @property
    def state(self) -> ModelState:
        """The state of the engines; they take requests only while one is ready."""
        return self._set.state

    @property
    def report(self) -> EngineReport:
        """The start-up table: as planned here; once an engine is ready, with the engine's own memory plan."""
        return self._report

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests; known once an engine has been ready."""
        if self._limits is None:
            raise ExecutionError(self._set.failure or "the model is still being loaded")
        return self._limits

    def stats(self) -> EngineStats:
        """Return the engines' latest counters, and the number of restarts. Does not mutate."""
        return self._set.stats()

    @property
    def replicas(self) -> ReplicaSet:
        """The engines, for inspection."""
        return self._set

    @property
    def failure(self) -> str:
        """Why no engine takes requests; empty while one does."""
        return self._set.failure

    @property
    def engine_process_id(self) -> int | None:
        """The id of the first engine's process; None while it does not run."""
        return self._set.replicas[0].process_id

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        ticket: Ticket = NO_TICKET,
        *,
        chat: ChatOptions | None = None,
    ) -> PreparedRequest:
        """Check a prompt and return its request; raises `InvalidRequestError` if the engine cannot serve it."""
        return await self._door.prepare_beside(prompt, self.limits, sampling, ticket, chat)

    def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a request; yield its new parts after each step. Closing the iterator ends the request."""
        if self.state is not ModelState.READY:
            raise ExecutionError(self.failure or "the model is still being loaded")
        return self._streams.deltas(prepared)

    def watch(self, every_s: float, show: ShowLive, replica: int = 0) -> None:
        """Call `show` with the memory events of an engine, at most once per `every_s` seconds.

        The first frames describe the present state, also after a restart of the engine. Mutates.
        """
        self._set.memory.watch(replica, every_s, show)

    def unwatch(self, replica: int = 0) -> None:
        """Stop showing memory events of an engine. Mutates."""
        self._set.memory.unwatch(replica)

    def send(self, command: AnyCommand) -> None:
        """Send a command, which takes effect before the next step; if no engine runs, drop it. Mutates."""
        self._set.send(command)

    def send_to(self, replica: int, command: AnyCommand) -> None:
        """Send a command to one engine; if it is not running, drop it. Mutates."""
        self._set.send_to(replica, command)

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the engine that holds most of a prompt; raises `ExecutionError` if none runs."""
        return self._set.holder(tokens, scope)

    async def load_adapter(self, name: str, find: Callable[[], str]) -> AdapterFacts:
        """Load the adapter in the folder that `find` returns, while steps run; raises if it does not fit."""
        return await self._door.adapters.load(name, find, self.send, self.stats)

    def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it go on. Mutates."""
        self._door.adapters.unload(name, self.send)

    # ---- the engines ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the engines, and restart them whenever they end, until `close`."""
        self._set.begin()

    async def wait_ready(self) -> None:
        """Wait until an engine is ready for the first time; raises `ExecutionError` if none can be started."""
        await self._set.settled.wait()
        if self.state is ModelState.FAILED:
            raise ExecutionError(self.failure)

    async def restart(self) -> None:
        """Restart the engines one after another, ending no request; raises if an engine does not come back."""
        await self._set.roll()

    async def close(self) -> None:
        """End all requests and the processes. May be called twice; later requests are refused.

        Does nothing in a forked process.
        """
        if not self._home.is_here:
            return
        await self._set.close()
        self._door.close()

    def kill(self) -> None:
        """Kill the engines, so that `close`, which must follow, waits for no step."""
        for replica in self._set.replicas:
            replica.kill()

    async def __aenter__(self) -> SupervisedLLM:
        self.start()
        await self.wait_ready()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _note_ready(self, replica: Replica) -> None:
        """Record a ready engine's report and the smallest limits of all engines; restore its adapters. Mutates."""
        if replica.report is None or replica.limits is None:
            return
        self._report = self._settings.shown_in(replica.report)
        every = [each.limits for each in self._set.replicas if each.limits is not None]
        self._limits = replace(
            replica.limits,
            max_model_len=min(each.max_model_len for each in every),
            max_sequence_tokens=min(each.max_sequence_tokens for each in every),
        )
        self._door.adapters.restore(replica.send)


async def _start_engine(
    config: EngineConfig, settings: ReplicaSettings, hash_key: bytes, index: int
) -> EngineConnection:
    """Start the engine of this number. Not a method, because a closed model must be freed at once."""
    configure = Configure(config, settings.patience, hash_key)
    if settings.start is not None:
        return await settings.start(configure)
    host = settings.host
    if host is None or not host.waits:
        host = WaitingHost(None if settings.num_replicas == 1 else environment_of(config, index, os.environ))
    return await host.engine(configure)
