"""Streams on their way: what has begun, what goes wrong before and after, and clients that leave at any moment."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect

from quire.core.errors import ExecutionError, InvalidRequestError
from quire.serve.config import ServerConfig
from quire.serve.errors import ApiError, overloaded
from quire.serve.render.events import error_event
from quire.serve.schemas.common import StreamFields
from quire.serve.schemas.ollama import OllamaChatRequest
from quire.serve.sse import JSON_PING, PING, EventStream, deadline, gone, unless

Message = MutableMapping[str, Any]
FAILED = b"data: failed\n\n"


class Client:
    """A client of one stream: it leaves after a number of messages, or stays (None)."""

    def __init__(self, leaves_after: int | None = None) -> None:
        self.messages: list[Message] = []
        self._leaves_after = leaves_after
        self._left = asyncio.Event()
        if leaves_after == 0:
            self._left.set()

    async def send(self, message: Message) -> None:
        await asyncio.sleep(0)
        self.messages.append(message)
        if len(self.messages) == self._leaves_after:
            self._left.set()

    async def receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    @property
    def body(self) -> bytes:
        return b"".join(each["body"] for each in self.messages[1:])

    @property
    def is_whole(self) -> bool:
        return bool(self.messages) and self.messages[-1] == {
            "type": "http.response.body",
            "body": b"",
            "more_body": False,
        }


class Source:
    """Events to be streamed; an exception among them is raised. Counts how often they were closed."""

    def __init__(self, *events: bytes | BaseException, is_endless: bool = False) -> None:
        self.num_closed = self.num_given = 0
        self._events = events
        self._is_endless = is_endless

    async def __call__(self) -> AsyncGenerator[bytes, None]:
        try:
            for event in self._events:
                if isinstance(event, BaseException):
                    raise event
                self.num_given += 1
                yield event
            if self._is_endless:
                await asyncio.Event().wait()
        finally:
            self.num_closed += 1


def run(source: Source, client: Callable[[], Client], *, limit_s: float | None = None) -> tuple[Client, Any]:
    """Stream to a client; return it, and what was raised."""

    async def streamed() -> tuple[Client, Any]:
        reader = client()
        config = ServerConfig() if limit_s is None else ServerConfig(request_timeout_s=limit_s)
        stream = EventStream(source(), config, error_event, StreamFields.stream_type)
        try:
            async with asyncio.timeout(300):
                await stream({}, reader.receive, reader.send)
        except Exception as error:
            return reader, error
        finally:
            assert len(asyncio.all_tasks()) == 1, "the stream has left a task behind"
        return reader, None

    return asyncio.run(streamed())


@given(st.lists(st.binary(min_size=1, max_size=5), min_size=1, max_size=6))
def test_a_stream_is_a_head_each_event_by_itself_and_an_end(events: list[bytes]) -> None:
    source = Source(*events)
    client, error = run(source, Client)
    assert error is None
    head, *bodies = client.messages
    assert (head["type"], head["status"]) == ("http.response.start", 200)
    assert dict(head["headers"]) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
    }
    assert [each["body"] for each in bodies] == [*events, b""]
    assert [each["more_body"] for each in bodies] == [True] * len(events) + [False]
    assert source.num_closed == 1


@pytest.mark.parametrize(
    "failure", [overloaded(2.0), ExecutionError("lost"), InvalidRequestError("n", 0, "1"), ZeroDivisionError("secret")]
)
def test_what_goes_wrong_before_the_first_event_is_an_answer_of_its_own(failure: Exception) -> None:
    source = Source(failure)
    client, error = run(source, Client)
    assert error is failure
    assert client.messages == []


@pytest.mark.parametrize(
    ("failure", "code", "is_logged"),
    [
        (overloaded(2.0), "server_is_overloaded", False),
        (ApiError(500, "the request was aborted", code="aborted"), "aborted", False),
        (ExecutionError("lost"), "engine_unavailable", False),
        (InvalidRequestError("n", 0, "1"), "invalid_value", False),
        (ZeroDivisionError("secret"), "internal_error", True),
    ],
)
def test_what_goes_wrong_later_is_the_last_event(
    failure: Exception, code: str, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source = Source(b"data: one\n\n", failure)
    with caplog.at_level(logging.ERROR, "quire.serve"):
        client, error = run(source, Client)
    assert error is None
    assert client.body.startswith(b"data: one\n\ndata: {")
    assert f'"code":"{code}"'.encode() in client.body
    assert b"secret" not in client.body
    assert client.is_whole
    assert [record.getMessage() for record in caplog.records] == (["a stream failed"] if is_logged else [])
    assert source.num_closed == 1


@given(st.integers(0, 8), st.integers(1, 6), st.booleans())
def test_a_client_may_leave_at_any_moment_and_the_events_are_closed(
    leaves_after: int, num_events: int, is_endless: bool
) -> None:
    source = Source(*(b"data: %d\n\n" % index for index in range(num_events)), is_endless=is_endless)
    num_messages = num_events + 2 - is_endless
    if is_endless:
        leaves_after = min(leaves_after, num_messages)
    client, error = run(source, lambda: Client(leaves_after))
    has_begun = bool(client.messages)
    assert isinstance(error, ClientDisconnect) if not has_begun else error is None
    assert client.is_whole == (not is_endless and len(client.messages) == num_messages)
    assert source.num_closed == (source.num_given > 0)
    assert source.num_given <= leaves_after + 2


class Eager(Client):
    """A client whose connection takes everything at once, so that no time passes between two messages."""

    async def send(self, message: Message) -> None:
        self.messages.append(message)


def test_time_that_is_over_before_the_first_event_is_an_answer_and_later_an_event() -> None:
    silent, begun = Source(is_endless=True), Source(b"data: one\n\n", is_endless=True)
    client, error = run(silent, Eager, limit_s=0.001)
    assert isinstance(error, ApiError)
    assert (error.status, error.detail.code, client.messages) == (504, "deadline_exceeded", [])
    assert error.headers == {"x-should-retry": "false"}
    client, error = run(begun, Eager, limit_s=0.02)
    assert error is None
    assert b'"code":"deadline_exceeded"' in client.body
    assert b"within 0.02 seconds, the limit of this server" in client.body
    assert client.is_whole
    assert (silent.num_closed, begun.num_closed) == (1, 1)


def test_a_stream_that_fails_to_be_sent_is_closed() -> None:
    source = Source(b"one", b"two")

    class Broken(Client):
        async def send(self, message: Message) -> None:
            if self.messages:
                raise OSError("the connection is gone")
            await super().send(message)

    _, error = run(source, Broken)
    assert isinstance(error, OSError)
    assert source.num_closed == 1


async def pinged(client: Client, *events: bytes | Exception, ping: bytes = PING) -> AsyncGenerator[bytes, None]:
    """Events, each after one more comment has been sent."""
    for index, event in enumerate(events):
        while client.messages[1:].count({"type": "http.response.body", "body": ping, "more_body": True}) <= index:
            await asyncio.sleep(0.001)
        if isinstance(event, Exception):
            raise event
        yield event


@pytest.mark.parametrize("ending", [b"data: two\n\n", ExecutionError("lost")])
def test_a_silent_stream_begins_without_an_event_and_is_kept_open_by_comments(ending: bytes | Exception) -> None:
    client = Client()
    kind = StreamFields.stream_type
    events = pinged(client, b"data: one\n\n", ending)

    async def test() -> None:
        await EventStream(events, ServerConfig(), error_event, kind, ping_s=0.01)({}, client.receive, client.send)

    during(test)
    assert client.messages[0]["status"] == 200
    first, last = [event for event in client.body.split(b"\n\n") if event and event + b"\n\n" != PING]
    assert first == b"data: one"
    assert last == b"data: two" if isinstance(ending, bytes) else b'"code":"engine_unavailable"' in last
    assert client.is_whole


def test_an_event_waits_while_a_comment_begins_the_stream() -> None:
    begins = asyncio.Event()

    class Slow(Client):
        async def send(self, message: Message) -> None:
            if message["type"] == "http.response.start":
                begins.set()
                await asyncio.sleep(0.05)
            await super().send(message)

    async def meanwhile() -> AsyncGenerator[bytes, None]:
        await begins.wait()
        yield b"one"

    client = Slow()

    async def test() -> None:
        kind = StreamFields.stream_type
        await EventStream(meanwhile(), ServerConfig(), error_event, kind, ping_s=0.001)({}, client.receive, client.send)

    during(test)
    assert [message.get("body") for message in client.messages if message.get("body") != PING] == [None, b"one", b""]
    assert client.messages[1]["body"] == PING


def test_lines_of_json_are_kept_open_by_spaces_before_the_next_line() -> None:
    client = Client()
    kind = OllamaChatRequest.stream_type
    events = pinged(client, b'{"n": 1}\n', b'{"n": 2}\n', ping=JSON_PING)

    async def test() -> None:
        await EventStream(events, ServerConfig(), error_event, kind, ping_s=0.01)({}, client.receive, client.send)

    during(test)
    lines = client.body.splitlines()
    assert [json.loads(line) for line in lines] == [{"n": 1}, {"n": 2}]
    assert client.body.endswith(b"}\n")
    assert all(line.startswith(b" ") for line in lines)


# ---- unless, gone and deadline --------------------------------------------------------------------------------------


def during(test: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(300):
            await test()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(limited())


def test_work_that_ends_first_is_returned_and_the_watch_ends() -> None:
    async def test() -> None:
        ended: list[str] = []

        async def watch() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("watch")

        async def work() -> int:
            await asyncio.sleep(0)
            return 7

        assert await unless(watch(), work()) == 7
        assert ended == ["watch"]

    during(test)


def test_work_is_ended_when_the_client_has_gone_and_may_clean_up() -> None:
    async def test() -> None:
        cleaned: list[str] = []

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                cleaned.append("work")

        with pytest.raises(ClientDisconnect):
            await unless(asyncio.sleep(0), work())
        assert cleaned == ["work"]

    during(test)


def test_work_that_has_ended_when_the_client_goes_is_not_lost() -> None:
    async def test() -> None:
        async def at_once() -> str:
            return "done"

        async def fail() -> None:
            raise ValueError("of the work")

        assert await unless(asyncio.sleep(0), at_once()) == "done"
        with pytest.raises(ValueError, match="of the work"):
            await unless(asyncio.sleep(0), fail())

    during(test)


def test_both_end_when_the_caller_is_cancelled() -> None:
    async def test() -> None:
        ended: list[str] = []

        async def wait(name: str) -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(name)

        task = asyncio.create_task(unless(wait("watch"), wait("work")))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(ended) == ["watch", "work"]

    during(test)


def test_only_a_disconnect_is_the_end_of_a_client() -> None:
    messages = [{"type": "http.request", "body": b"late"}, {"type": "http.request"}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    during(lambda: gone(receive))
    assert messages == []


def test_a_timeout_that_is_not_the_deadline_stays_what_it_is() -> None:
    async def test() -> None:
        for limit_s in (None, 200.0):
            with pytest.raises(TimeoutError, match="of something else"):
                async with deadline(limit_s):
                    raise TimeoutError("of something else")

    during(test)
