"""LoadableModel: a model that is loaded on demand and unloaded again. Endpoints see a `ServedModel`.

    planned ──► unloaded ── start: tokenizer, in a thread ──► engine process ──► ready ── unload ──► unloaded
                   report, limits and defaults are known in every state, from the plan

This process reads the tokenizer and other small files in a thread, so requests to other models continue. The engine, in
its own process, reads the weights.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from quire.core.adapters import AdapterFacts
from quire.core.config import ResolvedConfig
from quire.core.errors import ExecutionError, InvariantError
from quire.core.pooling import Pooling
from quire.core.request import CacheScope
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import Add, AnyCommand
from quire.engine.door import Ticket
from quire.engine.outputs import RequestDelta
from quire.engine.records.live import ShowLive
from quire.engine.records.report import EngineReport
from quire.engine.records.stats import EngineStats, ModelState
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import Prompt
from quire.engine.text.tenant_pool import TenantPool
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.model import SupervisedModel

NOT_LOADED: Final = "the model is not loaded"
LOADING: Final = "loading"
READING: Final = "reading of "
"""Prefix of a tenant's jobs in the pool: loading a model takes turns with tenants that open one to read about it."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """The facts about a model that are known before it is loaded."""

    config: ResolvedConfig
    report: EngineReport
    limits: RequestLimits
    default_sampling: SamplingParams


class LoadableModel:
    """A model that may or may not be loaded. Implements `ReloadableModel`; use it in one event loop.

    `open_model` reads the tokenizer and returns a model that is not started; it runs in a thread of `load_pool`, which
    loads one model at a time. `opened`: such a model, if it exists already.
    """

    def __init__(
        self,
        plan: PlannedModel,
        open_model: Callable[[], SupervisedModel],
        *,
        text_pool: TenantPool,
        load_pool: TenantPool,
        opened: SupervisedModel | None = None,
    ) -> None:
        self._plan = plan
        self._open = open_model
        self._load_pool = load_pool
        self._model = opened
        self._ending: asyncio.Task[None] | None = None
        self._absent = ModelState.STARTING if opened is not None else ModelState.UNLOADED  # its state without a model
        self._watched: dict[int, tuple[float, ShowLive]] = {}
        self.text_pool = text_pool

    @property
    def state(self) -> ModelState:
        """The state: unloaded, or the engine's."""
        return self._absent if self._model is None else self._model.state

    @property
    def config(self) -> ResolvedConfig:
        """The settings of the engine."""
        return self._plan.config if self._model is None else self._model.config

    @property
    def report(self) -> EngineReport:
        """The start-up table: the plan's, or the engine's."""
        return self._plan.report if self._model is None else self._model.report

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests: the plan's, or the engine's."""
        return self._model.limits if self._model is not None and self._model.state.has_engine else self._plan.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None while the model is not loaded."""
        return None if self._model is None else self._model.tokenizer

    def stats(self) -> EngineStats:
        """Return the present engine's counts; zeros if no engine runs."""
        return EngineStats() if self._model is None else self._model.stats()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: those of the settings, or of the model's makers."""
        return self._plan.default_sampling

    def pooling_for(self, kind: str | None, dimensions: int) -> Pooling:
        """Return how to pool a vector; raises `InvalidRequestError` if neither model nor settings specify it."""
        return self._present().pooling_for(kind, dimensions)

    async def prepare(
        self, prompt: Prompt, sampling: SamplingParams, ticket: Ticket, *, chat: ChatOptions | None = None
    ) -> PreparedRequest:
        """Return a request that the engine can serve; raises `InvalidRequestError` for any other."""
        return await self._present().prepare(prompt, sampling, ticket, chat=chat)

    def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a request; yield its new output as it arrives."""
        return self._present().deltas(prepared)

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests can use, by name."""
        return {} if self._model is None else self._model.adapters

    async def load_adapter(self, name: str, find: Callable[[], str]) -> AdapterFacts:
        """Load the adapter in the folder that `find` returns, while steps run; raises if it does not fit the model."""
        return await self._present().load_adapter(name, find)

    def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it continue."""
        self._present().unload_adapter(name)

    def send(self, command: AnyCommand) -> None:
        """Send the engine a command; no effect if no engine runs, except that `Add` raises."""
        if self._model is not None:
            self._model.send(command)
        elif isinstance(command, Add):
            raise ExecutionError(NOT_LOADED)

    def send_to(self, replica: int, command: AnyCommand) -> None:
        """Send one engine a command that belongs to no request. Mutates."""
        self._present().send_to(replica, command)

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the engine with the longest part of a prompt."""
        return self._present().holder(tokens, scope)

    def watch(self, every_s: float, show: ShowLive, replica: int = 0) -> None:
        """Call `show` with an engine's memory events, also after the model is loaded again. Mutates."""
        self._watched[replica] = every_s, show
        if self._model is not None:
            self._model.watch(every_s, show, replica)

    def unwatch(self, replica: int = 0) -> None:
        """Stop calling `show` for that engine. Mutates."""
        self._watched.pop(replica, None)
        if self._model is not None:
            self._model.unwatch(replica)

    async def restart(self) -> None:
        """Restart the engines one by one; requests continue. Raises `ExecutionError` if an engine does not restart."""
        await self._present().restart()

    # ---- loading ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Mark the model as loading; `wait_ready` does the work. Mutates."""
        if self._model is not None and self._model.state is not ModelState.STARTING:
            raise InvariantError("a model was loaded twice")
        self._absent = ModelState.STARTING

    async def wait_ready(self) -> None:
        """Load the model, and return when it takes requests. On an error, unloads it and raises the error."""
        try:
            if self._model is None:
                self._model = await self._load_pool.run(LOADING, self._open)
            self._model.start()
            for replica, watched in self._watched.items():
                self._model.watch(*watched, replica)
            await self._model.wait_ready()
        except BaseException:
            await self.unload()
            raise

    async def opened(self, tenant: str) -> SupervisedModel:
        """Return a second object for this model, with a tokenizer and without an engine; the caller closes it.

        Raises `TooManyJobsError` if too many requests of the tenant wait for this.
        """
        return await self._load_pool.run(READING + tenant, self._open)

    async def unload(self) -> None:
        """End the engine, and drop the tokenizer. Mutates."""
        model, self._model, self._absent = self._model, None, ModelState.UNLOADED
        if model is not None:
            self._ending = asyncio.create_task(model.close())
        if self._ending is not None:
            await asyncio.shield(self._ending)  # continues if this wait is cancelled; `close` waits for it

    def kill(self) -> None:
        """Kill the engine, so that `close`, which must follow, waits for no step."""
        if self._model is not None:
            self._model.kill()

    async def close(self) -> None:
        """End all requests and the engine for good; may be called twice. Mutates."""
        await self.unload()
        self._absent = ModelState.CLOSED

    def _present(self) -> SupervisedModel:
        if self._model is None:
            raise ExecutionError(NOT_LOADED)
        return self._model
