"""ServedModel: the interface of an engine, as the server uses it."""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Callable, Mapping
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
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import Prompt
from quire.engine.text.tenant_pool import TenantPool
from quire.engine.text.tokenizer import Tokenizer


class ServedModel(Protocol):
    """An engine with its tokenizer. Use it in one event loop."""

    @property
    def state(self) -> ModelState:
        """The engine's state; the engine takes requests only while it is ready."""
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
        """The limits of a request."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None if the model has none."""
        ...

    @property
    def text_pool(self) -> TenantPool:
        """The threads for work on long texts."""
        ...

    def stats(self) -> EngineStats:
        """Return the engine's counts, one step or 0.1 s old at most."""
        ...

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: those of the settings, or of the model's makers."""
        ...

    def pooling_for(self, kind: str | None, dimensions: int) -> Pooling:
        """Return how to pool a vector; raises `InvalidRequestError` if neither model nor settings specify it."""
        ...

    async def prepare(
        self, prompt: Prompt, sampling: SamplingParams, ticket: Ticket, *, chat: ChatOptions | None = None
    ) -> PreparedRequest:
        """Return a request that the engine can serve; raises `InvalidRequestError` for any other."""
        ...

    @property
    def adapters(self) -> Mapping[str, AdapterFacts]:
        """The adapters that requests can use, by name."""
        ...

    async def load_adapter(self, name: str, find: Callable[[], str]) -> AdapterFacts:
        """Load the adapter in the folder that `find` returns, while steps run; raises if it does not fit the model.

        `find` runs in a thread. Raises `TooManyJobsError` if many adapters wait to be read.
        """
        ...

    def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it continue."""
        ...

    def send(self, command: AnyCommand) -> None:
        """Send the engine a command, to run before its next step; no effect if the engine is not running."""
        ...

    def send_to(self, replica: int, command: AnyCommand) -> None:
        """Send one engine a command that belongs to no request."""
        ...

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the engine with the longest part of a prompt; raises `ExecutionError` if none runs."""
        ...

    def watch(self, every_s: float, show: ShowLive, replica: int = 0) -> None:
        """Call `show` with memory events of one engine from the beginning, at most once per `every_s` seconds.

        Starts again after a restart of the engine. Raises `ExecutionError` if the engine has failed for good.
        """
        ...

    def unwatch(self, replica: int = 0) -> None:
        """Stop calling `show` for that engine."""
        ...

    async def close(self) -> None:
        """End all requests and close the engine; may be called twice."""
        ...

    def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a request; yield its new output as it arrives. Closing the iterator ends the request.

        Raises `ExecutionError` if the engine is not running, or is lost meanwhile.
        """
        ...


class SupervisedModel(ServedModel, Protocol):
    """A model with checked settings that is not loaded yet."""

    def start(self) -> None:
        """Start loading; returns at once."""
        ...

    async def wait_ready(self) -> None:
        """Wait until the model takes requests; raises if it never will."""
        ...

    def kill(self) -> None:
        """Kill the engines, so that `close`, which must follow, waits for no step."""
        ...

    async def restart(self) -> None:
        """Restart the engines one by one; requests continue. Raises `ExecutionError` if an engine does not restart."""
        ...


class ReloadableModel(SupervisedModel, Protocol):
    """A model that can be started, unloaded and started again."""

    async def opened(self, tenant: str) -> SupervisedModel:
        """Return a second object for the same model, with a tokenizer and without an engine; the caller closes it.

        Tenants take turns. Raises `TooManyJobsError` if too many requests of the tenant wait.
        """
        ...

    async def unload(self) -> None:
        """End the engine and free its memory; the model can be started again."""
        ...
