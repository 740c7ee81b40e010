"""Answers that take a while: streams of events, and the watch over the client that is to read them.

    events ──► EventStream ──► one write for each step of the engine ──► client
                    ▲ closes the events, which ends the requests           │
                    └──────────────── the client has gone ◄────────────────┘

The status goes out with the first event, not before it: what goes wrong until then (a full queue, an engine that is
lost) is an answer with its own status, which clients know how to try again. What goes wrong later is an event, and the
stream ends with it. Most of an event is the same from token to token, so an `Envelope` writes that part once.

A client that leaves is noticed at once, by the message "http.disconnect". One that stays and reads nothing is cut off
by the guard; until then what waits for it is bounded by the buffer of its socket, because the deltas of a text add up
in the engine's own form while nobody takes them.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError, ErrorBody, api_error_of, deadline_exceeded
from quire.serve.schemas.common import Usage

DONE: Final = b"data: [DONE]\n\n"
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that gathers events makes a stream pointless
)

Result = TypeVar("Result")

logger = logging.getLogger("quire.serve")
_encode: Final = msgspec.json.Encoder().encode
_LINE_END: Final = re.compile("[\x85\u2028\u2029]")


def encode(value: object) -> bytes:
    r"""Return a value as JSON on one line, for every client's idea of a line.

    Some clients end lines where Unicode does, not only where the rules of event streams do, and JSON allows a text to
    have these characters as they are. So they are escaped.

    >>> encode({"text": "é\u2028"})
    b'{"text":"\xc3\xa9\\u2028"}'
    """
    data = _encode(value)
    if data.isascii():
        return data
    return _LINE_END.sub(lambda match: f"\\u{ord(match[0]):04x}", data.decode()).encode()


class Envelope:
    r"""The events of one stream of chunks: all alike but for one choice, and for the usage where it was asked for.

    >>> envelope = Envelope({"id": "cmpl-1"}, tells_usage=True)
    >>> envelope.chunk({"index": 0})
    b'data: {"id":"cmpl-1","choices":[{"index":0}],"usage":null}\n\n'
    """

    def __init__(self, fixed: Mapping[str, object], *, tells_usage: bool) -> None:
        self._head = b"data: " + encode(fixed)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if tells_usage else b"]}\n\n"

    def chunk(self, choice: object, usage: Usage | None = None) -> bytes:
        """Return the event of what is new of one text. Does not mutate."""
        tail = self._tail if usage is None else _usage_tail(usage)
        return self._head + encode(choice) + tail

    def usage(self, usage: Usage) -> bytes:
        """Return the event that tells what the call has taken, and nothing else. Does not mutate."""
        return self._head + _usage_tail(usage)


def _usage_tail(usage: Usage) -> bytes:
    return b'],"usage":' + encode(usage) + b"}\n\n"


def named_event(name: str, data: object) -> bytes:
    r"""Return an event of the kind that has a name.

    >>> named_event("response.created", {"sequence_number": 0})
    b'event: response.created\ndata: {"sequence_number":0}\n\n'
    """
    return b"event: " + name.encode() + b"\ndata: " + encode(data) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """Return the event that ends a stream which went wrong: the body that the answer would have had."""
    return b"data: " + encode(ErrorBody(error.detail)) + b"\n\n"


class EventStream:
    """An answer that is a stream of events. It closes `events`, whatever happens."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        config: ServerConfig,
        error_event: Callable[[ApiError], bytes] = error_event,
    ) -> None:
        self._events = events
        self._config = config
        self._error_event = error_event
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises what goes wrong before the first event."""
        try:
            await unless(gone(receive), self._write(send))
        except ClientDisconnect:
            if not self._has_begun:
                raise

    async def _write(self, send: Send) -> None:
        try:
            async with aclosing(self._events) as events, deadline(self._config.request_timeout_s):
                async for event in events:
                    await self._pass_on(send, event)
        except Exception as error:
            if not self._has_begun:
                raise
            answer = api_error_of(error)
            if answer.status == 500 and answer is not error:
                logger.exception("a stream failed")
            await self._pass_on(send, self._error_event(answer))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _pass_on(self, send: Send, event: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        await send({"type": "http.response.body", "body": event, "more_body": True})


async def unless(end: Coroutine[Any, Any, None], work: Coroutine[Any, Any, Result]) -> Result:
    """Return what `work` returns; raise `ClientDisconnect` where `end` is over before. Neither goes on after that."""
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
    """Return what `work` returns; end it when the client goes, and when its time is over."""

    async def limited() -> Result:
        async with deadline(config.request_timeout_s):
            return await work()

    return await unless(gone(request.receive), limited())


async def gone(receive: Receive) -> None:
    """Return when the client has gone. Its request must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def deadline(limit_s: float | None) -> AsyncIterator[None]:
    """End what takes longer than the limit, and raise `ApiError` for it."""
    try:
        async with asyncio.timeout(limit_s) as timeout:
            yield
    except TimeoutError:
        if limit_s is None or not timeout.expired():
            raise
        raise deadline_exceeded(limit_s) from None
