"""LoadableModel: a model that is loaded when it is needed, and unloaded again. To endpoints it is one `ServedModel`.

    planned ──► unloaded ── start: tokenizer, in a thread ──► engine process ──► ready ── unload ──► unloaded
                   report, limits and defaults are known in every state, from the plan

What is read in this process, the tokenizer above all, is read in a thread: calls to other models go on meanwhile. The
weights are read by the engine, which is a process of its own.
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
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import ChatOptions, Prompt
from quire.engine.text.tenant_pool import TenantPool
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.model import SupervisedModel

NOT_LOADED: Final = "the model is not loaded"
LOADING: Final = "loading"
READING: Final = "reading of "
"""Jobs in the pool: loading takes turns with the tenants who only read about a model, none of which has its name."""


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """All that is known of a model before it is loaded."""

    config: ResolvedConfig
    report: EngineReport
    limits: RequestLimits
    default_sampling: SamplingParams


class LoadableModel:
    """A model that is there or not. Implements `ReloadableModel`; use it in one event loop.

    `open_model` reads the tokenizer and returns a model that is not started; it runs in a thread of `load_pool`, which
    loads one model at a time. `opened`: such a model that is there already.
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
        """Where it is: unloaded, or where its engine stands."""
        return self._absent if self._model is None else self._model.state

    @property
    def config(self) -> ResolvedConfig:
        """The settings of its engine."""
        return self._plan.config if self._model is None else self._model.config

    @property
    def report(self) -> EngineReport:
        """The start-up table: as planned, or that of the engine."""
        return self._plan.report if self._model is None else self._model.report

    @property
    def limits(self) -> RequestLimits:
        """The limits of requests: as planned, or those of the engine."""
        return self._model.limits if self._model is not None and self._model.state.has_engine else self._plan.limits

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None while it is not loaded."""
        return None if self._model is None else self._model.tokenizer

    def stats(self) -> EngineStats:
        """Return counts of what the present engine has done; zeros without one."""
        return EngineStats() if self._model is None else self._model.stats()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return how the makers of the model want it sampled."""
        return self._plan.default_sampling

    def pooling_for(self, kind: str | None, dimensions: int) -> Pooling:
        """Return how to make a vector; raises `InvalidRequestError` if nothing says how."""
        return self._present().pooling_for(kind, dimensions)

    async def prepare(
        self, prompt: Prompt, sampling: SamplingParams, ticket: Ticket, *, chat: ChatOptions | None = None
    ) -> PreparedRequest:
        """Return a request that the engine can serve; raises `InvalidRequestError` for what it cannot."""
        return await self._present().prepare(prompt, sampling, ticket, chat=chat)

    def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a request; yield what is new each time it got further."""
        return self._present().deltas(prepared)

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests may ask for, by name."""
        return {} if self._model is None else self._model.adapters

    async def load_adapter(self, name: str, folder: str) -> AdapterFacts:
        """Load the adapter in a folder while steps run, and give it a name; raises for one that does not fit."""
        return await self._present().load_adapter(name, folder)

    def unload_adapter(self, name: str) -> None:
        """Take the name of an adapter away; requests that have it go on."""
        self._present().unload_adapter(name)

    def send(self, command: AnyCommand) -> None:
        """Have the engine carry out a command; one that is not there has nothing to do."""
        if self._model is not None:
            self._model.send(command)
        elif isinstance(command, Add):
            raise ExecutionError(NOT_LOADED)

    def send_to(self, replica: int, command: AnyCommand) -> None:
        """Have one engine carry out a command that is not of a request. Mutates."""
        self._present().send_to(replica, command)

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the engine that holds the most of a prompt."""
        return self._present().holder(tokens, scope)

    def watch(self, every_s: float, show: ShowLive, replica: int = 0) -> None:
        """Call `show` with memory events of an engine, now and each time that it was loaded again. Mutates."""
        self._watched[replica] = every_s, show
        if self._model is not None:
            self._model.watch(every_s, show, replica)

    def unwatch(self, replica: int = 0) -> None:
        """Have nothing of that engine shown any more. Mutates."""
        self._watched.pop(replica, None)
        if self._model is not None:
            self._model.unwatch(replica)

    async def restart(self) -> None:
        """Restart its engines one after another; requests go on. Raises `ExecutionError` if one does not come back."""
        await self._present().restart()

    # ---- loading ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to load it; `wait_ready` goes on. Mutates."""
        if self._model is not None and self._model.state is not ModelState.STARTING:
            raise InvariantError("a model was loaded twice")
        self._absent = ModelState.STARTING

    async def wait_ready(self) -> None:
        """Load it, and return when it takes requests. Raises what it cannot be loaded for; it is unloaded then."""
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
        """Return another one of this model, with its tokenizer and without an engine; the caller closes it.

        Raises `TooManyJobsError` if too many calls of the tenant wait for that.
        """
        return await self._load_pool.run(READING + tenant, self._open)

    async def unload(self) -> None:
        """End its engine, and forget its tokenizer. Mutates."""
        model, self._model, self._absent = self._model, None, ModelState.UNLOADED
        if model is not None:
            self._ending = asyncio.create_task(model.close())
        if self._ending is not None:
            await asyncio.shield(self._ending)  # it goes on if this wait is cancelled, and `close` waits for it

    async def close(self) -> None:
        """End all requests and the engine for good; may be called twice. Mutates."""
        await self.unload()
        self._absent = ModelState.CLOSED

    def _present(self) -> SupervisedModel:
        if self._model is None:
            raise ExecutionError(NOT_LOADED)
        return self._model
