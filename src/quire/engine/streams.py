"""RequestStreams: concurrent requests in one event loop, each read by its own task.

    task ── _run ──► OutputProcessor.add ──► EngineLink.send ──► engine, in a thread or a process
      ▲                                                            │
      └── RequestText ◄── OutputProcessor ◄── process ◄────────────┘  the updates of a step

All work on text is done in the event loop; the engine never waits for a reader. A slow reader misses wake-ups, never
text. Leaving the iterator, by `break`, by cancellation or by an exception, ends the request and frees its blocks within
a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from quire.core.adapters import AdapterFacts
from quire.core.clock import Clock
from quire.core.errors import ExecutionError
from quire.engine.client import EngineLink, SequenceUpdate
from quire.engine.outputs import RequestDelta, RequestOutput
from quire.engine.process.adapter_set import AdapterSet, Stats
from quire.engine.records.stats import EngineStats
from quire.engine.text.output_processor import Condemn, OutputProcessor, PreparedRequest, RequestText
from quire.engine.text.tokenizer import Tokenizer

logger = logging.getLogger("quire.engine")


@dataclass(slots=True)
class _Stream:
    shown_id: str
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""

    def require_engine(self) -> None:
        """Raise if the engine has failed."""
        if self.failure:
            raise ExecutionError(self.failure)


class RequestStreams:
    """The requests of one event loop. Use it in that loop only."""

    def __init__(
        self, link: EngineLink, tokenizer: Tokenizer | None, clock: Clock, condemn: Condemn | None = None
    ) -> None:
        self._link = link
        self._adapters: tuple[AdapterSet, Stats] | None = None
        self._processor = OutputProcessor(link, tokenizer, clock, condemn)
        self._streams: dict[str, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def hold_adapters(self, adapters: AdapterSet, stats: Stats) -> None:
        """Make requests wait until the engine has their adapters; `stats` reports which it has. Mutates."""
        self._adapters = adapters, stats

    async def snapshots(self, prepared: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        """Run a request; yield its output so far, each time it advances."""
        async with aclosing(self._run(prepared)) as progress:
            async for request in progress:
                yield request.output()

    async def deltas(self, prepared: PreparedRequest) -> AsyncGenerator[RequestDelta, None]:
        """Run a request; yield its new output, each time it advances.

        The first delta comes with the first token, even if it has no text because the best texts are chosen later.
        """
        has_begun = False
        async with aclosing(self._run(prepared)) as progress:
            async for request in progress:
                delta = request.take_delta()
                begins = not has_begun and delta.num_generated_tokens > 0
                has_begun |= begins
                if begins or delta.outputs or delta.prompt_logprobs or delta.finished:
                    yield delta

    def process(self, updates: list[SequenceUpdate]) -> None:
        """Process updates of the engine. Mutates."""
        try:
            self._processor.process(updates)
        except Exception as error:  # a bug: no reader must wait for updates that are lost
            logger.exception("updates of the engine cannot be processed")
            self.lose(f"the outputs of the engine cannot be processed: {type(error).__name__}: {error}")

    def abort(self, shown_id: str) -> None:
        """Abort the requests with this id; their iterators end with the output so far. Mutates."""
        for internal_id, stream in list(self._streams.items()):
            if stream.shown_id == shown_id:
                self._processor.abort(internal_id)

    def lose(self, message: str, request_ids: Sequence[str] | None = None) -> None:
        """Make these requests, or all, raise `ExecutionError` to their readers: they cannot go on. Mutates."""
        for request_id in list(self._streams) if request_ids is None else request_ids:
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream.failure = stream.failure or message
            stream.changed.set()

    async def _run(self, prepared: PreparedRequest) -> AsyncGenerator[RequestText, None]:
        stream = _Stream(prepared.shown_id)
        request = self._processor.add(prepared, lambda _: stream.changed.set())
        self._streams[request.request_id] = stream
        held = None
        try:
            held = await self._held(prepared.request.scope.adapter, stream)
            stream.require_engine()
            if not request.finished:  # else it was aborted while it waited for its adapter
                self._link.send(prepared.request)
            finished = False
            while not finished:
                await stream.changed.wait()
                stream.changed.clear()
                finished = request.finished
                if not finished:
                    stream.require_engine()
                yield request
        finally:
            del self._streams[request.request_id]
            self._processor.abort(request.request_id)
            if held is not None and self._adapters is not None:
                self._adapters[0].release(held, self._link.send)

    async def _held(self, digest: str, stream: _Stream) -> AdapterFacts | None:
        """Wait until the engine has a request's adapter, and return it; None: no adapter, or an unknown one."""
        if not digest or self._adapters is None:
            return None
        adapters, stats = self._adapters

        def stats_of_engine() -> EngineStats:
            stream.require_engine()
            return stats()

        facts = adapters.facts_of(digest)
        if facts is not None:
            await adapters.hold(facts, self._link.send, stats_of_engine)
        return facts
