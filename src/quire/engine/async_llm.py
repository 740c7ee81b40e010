"""AsyncLLM: many callers of one model, in an event loop.

    task ── generate ──► Door: tokens, checks ──► EngineThread ──► steps
      ▲                                               │
      └── snapshots ◄── RequestStreams ◄──────────────┘  once per step, by call_soon_threadsafe

See `streams` for how requests are read and what happens when a reader leaves.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Unpack

from quire.core.adapters import AdapterFacts
from quire.core.clock import Clock, SystemClock
from quire.core.config import EngineConfig, EngineSettings
from quire.core.errors import ExecutionError, RequestStateError
from quire.core.executor import NoteLoaded
from quire.core.request import DEFAULT_SCOPE, CacheScope
from quire.core.sampling_params import SamplingParams
from quire.core.validate import RequestLimits
from quire.engine.client import EngineClient, SequenceUpdate
from quire.engine.commands import Abort, AnyCommand, OperatorVerbs, Watch
from quire.engine.door import NO_TICKET, LocalModel, Ticket, make_config, open_engine
from quire.engine.outputs import RequestDelta, RequestOutput
from quire.engine.process.engine_thread import EngineCallbacks, EngineThread
from quire.engine.process.ownership import Home
from quire.engine.records.live import LiveFrame, ShowLive
from quire.engine.records.stats import EngineStats, ModelState
from quire.engine.streams import RequestStreams
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.output_processor import PreparedRequest
from quire.engine.text.prompts import Prompt


class AsyncLLM(LocalModel, OperatorVerbs):
    """A model in this process for many callers at once. Settings are the fields of `EngineConfig`, as keywords.

    Requests run in one event loop at a time, in the process that opened the model; a forked process is refused.
    `note_loaded`: as for `LLM`.

    >>> async def read() -> list[int]:
    ...     async with AsyncLLM("guide", kv_memory="4MiB") as llm:
    ...         sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ...         return [len(output.outputs[0].token_ids) async for output in llm.generate("The memory", sampling)]
    >>> asyncio.run(read())[-1]
    3
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig = "guide",
        *,
        clock: Clock | None = None,
        note_loaded: NoteLoaded | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        clock = clock or SystemClock()
        super().__init__(*open_engine(make_config(model, settings), clock, note_loaded))
        self._client = EngineClient(self._core)
        self._stats = self._client.stats()
        callbacks = EngineCallbacks(self._receive, self._lose, self._take_stats, self._take_live)
        self._thread = EngineThread(self._client, callbacks, clock)
        self._streams = RequestStreams(self._thread, self._door.tokenizer, clock, self._door.condemn)
        self._streams.hold_adapters(self._door.adapters, self.stats)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failure = ""
        self._show: ShowLive | None = None  # receives memory events
        self._home = Home()
        self._finalizer = weakref.finalize(self, _close, self._thread, self._home)  # also when the program exits

    @property
    def state(self) -> ModelState:
        """The state of the engine: ready, or permanently failed."""
        return ModelState.FAILED if self._failure else ModelState.READY

    @property
    def limits(self) -> RequestLimits:
        """The engine's limits for requests."""
        return self._client.limits

    def stats(self) -> EngineStats:
        """Return the engine's counters, at most one step or 0.1 s old. Does not mutate."""
        return self._stats

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int = 0,
        scope: CacheScope = DEFAULT_SCOPE,
        chat: ChatOptions | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Return an iterator over snapshots of the output of one prompt: a text, token ids, or a conversation.

        The request starts with the first iteration. An invalid request raises `InvalidRequestError` then; one that
        fails while it runs yields a last output with `finish_reason` "error". A failed engine raises `ExecutionError`.
        To use an adapter, pass `scope=CacheScope(adapter=llm.adapters[name].digest)`.
        """
        return self._run(prompt, sampling_params, Ticket(request_id, scope, priority), chat)

    async def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        ticket: Ticket = NO_TICKET,
        *,
        chat: ChatOptions | None = None,
    ) -> PreparedRequest:
        """Check a prompt and return the request that `deltas` runs; raises as `generate` does."""
        self._require_engine()
        prepared = await self._door.prepare_beside(prompt, self.limits, sampling, ticket, chat)
        self._require_engine()
        return prepared

    def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Return an iterator over the new parts of a request's output, for streaming."""
        self._require_engine()
        return self._streams.deltas(prepared)

    def abort(self, request_id: str) -> None:
        """Abort the requests with this id; their iterators end with the output so far. Mutates."""
        self._streams.abort(request_id)

    def watch(self, every_s: float, show: ShowLive) -> None:
        """Call `show` in this event loop with memory events, at most once per `every_s` seconds.

        The first frames describe the present state. Mutates.
        """
        self._require_engine()
        self._show = show
        self._thread.send(Watch(every_s))

    def unwatch(self) -> None:
        """Stop calling `show`. Mutates."""
        self._thread.send(Watch(None))

    def send(self, command: AnyCommand) -> None:
        """Send the engine a command, which takes effect before its next step; from any thread. Mutates."""
        self._require_running()
        self._thread.send(command)

    async def load_adapter(self, name: str, folder: str) -> AdapterFacts:
        """Load the adapter in a folder under a name, while steps run; raises if it does not fit."""
        self._require_engine()
        return await self._door.adapters.load(name, lambda: folder, self.send, self.stats)

    def unload_adapter(self, name: str) -> None:
        """Remove the name of an adapter; requests that use it go on. Mutates."""
        self._door.adapters.unload(name, self.send)

    async def close(self) -> None:
        """End all requests and free the memory. May be called twice; later calls raise an error."""
        self._end("the engine is closed")
        if self._home.is_here:
            await asyncio.to_thread(self._finalizer)
            self._door.close()

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(
        self, prompt: Prompt, sampling: SamplingParams | None, ticket: Ticket, chat: ChatOptions | None
    ) -> AsyncGenerator[RequestOutput, None]:
        prepared = await self.prepare(prompt, sampling, ticket, chat=chat)
        async with aclosing(self._streams.snapshots(prepared)) as snapshots:
            async for output in snapshots:
                yield output

    def _require_engine(self) -> None:
        """Raise unless the engine runs and serves this event loop."""
        self._require_running()
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._streams:
                raise RequestStateError("the requests of an AsyncLLM belong to one event loop at a time")
            self._loop = loop

    def _require_running(self) -> None:
        """Raise unless the engine runs, in this process."""
        self._home.require()
        if self._failure:
            raise ExecutionError(self._failure)

    def _take_stats(self, stats: EngineStats) -> None:
        self._stats = stats

    def _take_live(self, frame: LiveFrame) -> None:
        """Hand a frame to the event loop; called by the engine's thread."""
        show = self._show
        if show is not None:
            self._in_loop(lambda: show(frame))

    def _receive(self, updates: list[SequenceUpdate]) -> None:
        """Hand updates to the event loop; called by the engine's thread."""
        if not self._in_loop(lambda: self._streams.process(updates)):
            for request_id in {update.request_id for update in updates}:  # their readers are gone
                self._client.send(Abort(request_id))

    def _lose(self, message: str) -> None:
        """Note that the engine has failed; called by its thread."""
        if not self._in_loop(lambda: self._end(message)):
            self._failure = message

    def _in_loop(self, call: Callable[[], None]) -> bool:
        """Schedule a call in the event loop; return False if there is no loop, or it is closed."""
        try:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(call)
                return True
        except RuntimeError:
            pass
        return False

    def _end(self, message: str) -> None:
        self._failure = self._failure or message
        self._streams.lose(self._failure)


def _close(thread: EngineThread, home: Home) -> None:
    """End the thread of an engine; a forked process does not have it."""
    if home.is_here:
        thread.close()
