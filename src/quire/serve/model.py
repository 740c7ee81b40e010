"""ServedModel: what the server asks of an engine, wherever that runs."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from quire.core.adapters import AdapterFacts
from quire.core.config import ResolvedConfig
from quire.core.pooling import Pooling
from quire.core.request import CacheScope
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.commands import AnyCommand
from quire.engine.door import Ticket
from quire.engine.outputs import RequestDelta
from quire.engine.records.live import ShowLive
from quire.engine.records.report import EngineReport
from quire.engine.records.stats import EngineStats, ModelState
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import ChatOptions, Prompt
from quire.engine.text.tenant_pool import TenantPool
from quire.engine.text.tokenizer import Tokenizer


class ServedModel(Protocol):
    """An engine with its tokenizer. Use it in one event loop."""

    @property
    def state(self) -> ModelState:
        """Where the engine stands; it takes requests only while it is ready."""
        ...

    @property
    def config(self) -> ResolvedConfig:
        """The settings of the engine."""
        ...

    @property
    def report(self) -> EngineReport:
        """The start-up table."""
        ...

    @property
    def limits(self) -> RequestLimits:
        """What the engine can take."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None where there is none."""
        ...

    @property
    def text_pool(self) -> TenantPool:
        """The threads for work on long texts."""
        ...

    def stats(self) -> EngineStats:
        """Return counts of what the engine has done, one step or 0.1 s old at most."""
        ...

    def get_default_sampling_params(self) -> SamplingParams:
        """Return how the makers of the model want it sampled."""
        ...

    def pooling_for(self, kind: str | None, dimensions: int) -> Pooling:
        """Return how to make a vector; raises `InvalidRequestError` if nothing says how."""
        ...

    async def prepare(
        self, prompt: Prompt, sampling: SamplingParams, ticket: Ticket, *, chat: ChatOptions | None = None
    ) -> PreparedRequest:
        """Return a request that the engine can serve; raises `InvalidRequestError` for what it cannot."""
        ...

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests may ask for, by name."""
        ...

    async def load_adapter(self, name: str, folder: str) -> AdapterFacts:
        """Load the adapter in a folder while steps run, and give it a name; raises for one that does not fit."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Take the name of an adapter away; requests that have it go on."""
        ...

    def send(self, command: AnyCommand) -> None:
        """Have the engine carry out a command before its next step; one that is not there has nothing to do."""
        ...

    def send_to(self, replica: int, command: AnyCommand) -> None:
        """Have one engine carry out a command that is not of a request."""
        ...

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the engine that holds the most of a prompt; raises `ExecutionError` without any."""
        ...

    def watch(self, every_s: float, show: ShowLive, replica: int = 0) -> None:
        """Call `show` with memory events of one engine from the beginning, at most once per `every_s` seconds.

        It begins again after the engine was started again. Raises `ExecutionError` if the engine has failed for good.
        """
        ...

    def unwatch(self, replica: int = 0) -> None:
        """Have nothing of that engine shown any more."""
        ...

    async def close(self) -> None:
        """End all requests and let the engine go; may be called twice."""
        ...

    def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a request; yield what is new each time it got further. Closing the iterator ends the request.

        Raises `ExecutionError` where the engine is not running, or is lost on the way.
        """
        ...


class SupervisedModel(ServedModel, Protocol):
    """A model whose settings were checked, and that is not loaded yet."""

    def start(self) -> None:
        """Begin to load it; returns at once."""
        ...

    async def wait_ready(self) -> None:
        """Wait until it takes requests; raises where it never will."""
        ...

    async def restart(self) -> None:
        """Restart its engines one after another; requests go on. Raises `ExecutionError` if one does not come back."""
        ...


class ReloadableModel(SupervisedModel, Protocol):
    """A model that can be started, unloaded and started again."""

    async def opened(self, tenant: str) -> SupervisedModel:
        """Return another one of the same model, with its tokenizer and without an engine; the caller closes it.

        Tenants take turns. Raises `TooManyJobsError` if too many calls of the tenant wait.
        """
        ...

    async def unload(self) -> None:
        """End its engine and free its memory; it can be started again."""
        ...
