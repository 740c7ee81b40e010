"""Long answers: event streams, and the watch for a client that disconnects.

    events ──► EventStream ──► one write for each step of the engine ──► client
                    ▲ closes the events, which ends the requests           │
                    └──────────────── the client has gone ◄────────────────┘

The status is sent with the first event, not before: an earlier error (a full queue, a lost engine) is an answer with
its own status, which clients know how to retry. A later error is an event, which ends the stream. While a long prompt
is computed, comments keep the connection open: many clients and proxies give up after a silent minute. Lines of JSON
cannot have comments, but a space before a line changes nothing for those who read it.

The message "http.disconnect" reports a client that leaves at once. The guard disconnects a client that stays and reads
nothing; until then, the socket's buffer bounds the waiting data, because unread deltas of a text are merged into one.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError, api_error_of, deadline_exceeded

HEADERS: Final = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that buffers events defeats a stream
)

PING_S: Final = 20.0
"""How often a stream that is silent gets a comment."""

PING: Final = b": still working\n\n"
EVENTS: Final = "text/event-stream"
"""The type of streams that may have comments."""

JSON_PING: Final = b" "
"""For lines of JSON: the beginning of the next one. An empty line would be an error to clients that read every line."""

Result = TypeVar("Result")

logger = logging.getLogger("quire.serve")


class LongAnswer(ABC):
    """An answer that takes a while. A client that leaves is an error only before the answer has begun."""

    has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises an error that occurs before the first byte."""
        try:
            await unless(gone(receive), self.write(send))
        except ClientDisconnect:
            if not self.has_begun:
                raise

    @abstractmethod
    async def write(self, send: Send) -> None:
        """Send the answer, and set `has_begun` when it begins."""


class EventStream(LongAnswer):
    """An answer that is a stream of events. Always closes `events`."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        config: ServerConfig,
        error_event: Callable[[ApiError], bytes],
        media_type: str,
        ping_s: float = PING_S,
    ) -> None:
        self._events = events
        self._config = config
        self._error_event = error_event
        self._headers = [(b"content-type", media_type.encode()), *HEADERS]
        self._ping, self._ping_s = PING if media_type.startswith(EVENTS) else JSON_PING, ping_s
        self._num_sent = 0
        self._turn = asyncio.Lock()

    async def write(self, send: Send) -> None:
        """Send events as they arrive; an error after the first event is sent as an event."""
        async with self._kept_open(send):
            try:
                async with aclosing(self._events) as events, deadline(self._config.request_timeout_s):
                    async for event in events:
                        await self._pass_on(send, event)
            except Exception as error:
                if not self.has_begun:
                    raise
                answer = api_error_of(error)
                if answer.status == 500 and answer is not error:
                    logger.exception("a stream failed")
                await self._pass_on(send, self._error_event(answer))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, send: Send, event: bytes) -> None:
        async with self._turn:
            self._num_sent += 1
            if not self.has_begun:
                self.has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
            await send({"type": "http.response.body", "body": event, "more_body": True})

    @asynccontextmanager
    async def _kept_open(self, send: Send) -> AsyncIterator[None]:
        """Send comments while the stream is silent."""

        async def ping() -> None:
            while True:
                num_sent = self._num_sent
                await asyncio.sleep(self._ping_s)
                if self._num_sent == num_sent:
                    await self._pass_on(send, self._ping)

        task = asyncio.create_task(ping())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def unless(end: Coroutine[Any, Any, None], work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`; raise `ClientDisconnect` if `end` finishes first. Cancels the other one."""
    worker, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait((worker, ending), return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientDisconnect
        return worker.result()
    finally:
        for task in (worker, ending):
            task.cancel()
        await asyncio.gather(worker, ending, return_exceptions=True)


async def unless_gone(
    request: Request, work: Callable[[], Coroutine[Any, Any, Result]], config: ServerConfig
) -> Result:
    """Return the result of `work`; end it when the client disconnects or at the time limit."""

    async def limited() -> Result:
        async with deadline(config.request_timeout_s):
            return await work()

    return await unless(gone(request.receive), limited())


async def gone(receive: Receive) -> None:
    """Wait until the client has disconnected. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def deadline(limit_s: float | None) -> AsyncIterator[None]:
    """End a block that takes longer than the limit, and raise `ApiError`."""
    try:
        async with asyncio.timeout(limit_s) as timeout:
            yield
    except TimeoutError:
        if limit_s is None or not timeout.expired():
            raise
        raise deadline_exceeded(limit_s) from None
