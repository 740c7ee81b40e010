"""The measuring client against servers that answer badly: that is the outcome of a request, never the end of a run."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import ExecutionError, InvalidValueError
from quire.instruments.bench.load_run import LoadResult, LoadRun, Target, error_message, retry_after_s, run_batch
from quire.instruments.bench.streams import Outcome, StreamReading
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.instruments.http.connection import HttpClient, Reply
from quire.instruments.http.plain import Answer

DEEP = b'{"error": ' + b"[" * 100_000
REQUEST = WorkloadRequest((5, 6, 7), 4)
TOKEN = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
chunks = st.fixed_dictionaries({}, optional={"choices": json_values, "usage": json_values, "error": json_values})


def read(data: bytes, size: int = 1 << 30) -> tuple[Outcome, StreamReading]:
    outcome = Outcome(0.0)
    reading = StreamReading(outcome)
    for number, at in enumerate(range(0, len(data), size)):
        reading.take(data[at : at + size], float(number))
    return outcome, reading


@given(
    events=st.lists(st.one_of(chunks.map(lambda each: json.dumps(each).encode()), st.binary(max_size=20)), max_size=4)
)
def test_whatever_a_stream_says_it_is_read_and_the_same_however_it_is_cut(events: list[bytes]) -> None:
    data = b"".join(b"data: " + event.replace(b"\r", b"") + b"\n\n" for event in events) + TOKEN + b"data: [DONE]\n\n"
    whole, reading = read(data)
    assert reading.is_ended
    assert whole.events_s
    for size in (1, 7):
        cut, _ = read(data, size)
        assert (cut.error, len(cut.events_s), cut.num_output_tokens) == (
            whole.error,
            len(whole.events_s),
            whole.num_output_tokens,
        )


def test_an_event_that_nests_too_deep_is_an_error_of_its_stream_and_the_rest_is_read() -> None:
    outcome, reading = read(TOKEN + b"data: " + DEEP + b"\n\n" + TOKEN + b"data: [DONE]\n\n")
    assert outcome.error.startswith("an event cannot be read: ")
    assert (len(outcome.events_s), reading.is_ended) == (2, True)


def test_the_first_error_of_a_stream_is_kept() -> None:
    outcome, _ = read(b'data: {"error": "first"}\n\ndata: {\n\ndata: {"error": "third"}\n\n')
    assert outcome.error == "an error in the stream: first"


# ---- replies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, 0.1),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "0"}, 0.0),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after-ms": "nan", "retry-after": "9"}, 9.0),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0.1),
        *(({"retry-after": text}, 0.1) for text in ("nan", "inf", "1e999", "-1", "")),
    ],
)
def test_a_time_to_wait_is_one_or_is_not_told(headers: dict[str, str], seconds: float) -> None:
    assert retry_after_s(Reply(503, headers)) == seconds


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no"}}', "400: no"),
        (b'{"error": "no"}', '400: {"error": "no"}'),
        (b"[]", "400: []"),
        (b"\xff<html>", "400: \ufffd<html>"),
        (b"", "400: "),
        (b"x" * 300, "400: " + "x" * 200),
        (DEEP, "400: " + DEEP[:200].decode()),
    ],
)
def test_a_refusal_is_told_in_the_words_of_the_server_or_as_it_came(body: bytes, message: str) -> None:
    assert error_message(Reply(400, {}, bytearray(body))) == message


def test_an_answer_that_nests_too_deep_has_no_error_object_and_is_no_json() -> None:
    answer = Answer(500, {}, DEEP, 0.0)
    assert answer.error == {}
    with pytest.raises(ExecutionError, match=r"^the server answered 500 with a body that is not JSON: "):
        answer.json()


@pytest.mark.parametrize("url", ["http://h:x", "http://h:99999", "http://h:-1", "http://[::1", "http://h\r\nX: y/"])
def test_an_address_that_is_none_is_refused_by_name(url: str) -> None:
    with pytest.raises(InvalidValueError, match=r"^url is .*; allowed: http://HOST:PORT, or https://$"):
        HttpClient(url)


# ---- runs -----------------------------------------------------------------------------------------------------------


def streamed(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"


ANSWERS: dict[str, tuple[bytes, str]] = {
    "good": (streamed(TOKEN * 2 + b"data: [DONE]\n\n"), ""),
    "ends early": (streamed(TOKEN), "the stream ended early"),
    "deep event": (streamed(b"data: " + DEEP + b"\n\ndata: [DONE]\n\n"), "an event cannot be read"),
    "deep refusal": (b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n" % len(DEEP) + DEEP, "400: "),
    "no HTTP": (b"\x00\x01\x02\x03\r\n\r\n", "ConnectionResetError: the reply is not HTTP"),
    "nothing": (b"", "ConnectionResetError: the connection ended before the reply"),
    "half a body": (b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + TOKEN, "ConnectionResetError: "),
}


class HostileServer:
    """Answers each connection with the next of some answers, in a thread, until it is closed."""

    def __init__(self, answers: list[bytes]) -> None:
        self._answers = iter(answers)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.url = ""

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._over.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(next(self._answers, b""))
            await writer.drain()
            writer.write_eof()
            await reader.read()
        writer.close()

    def __enter__(self) -> HostileServer:
        self._thread.start()
        assert self._started.wait(300)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_bad_answer_is_the_outcome_of_its_request(name: str) -> None:
    answer, error = ANSWERS[name]
    with HostileServer([answer]) as server:
        (outcome,) = run_batch(Target(server.url, "m", "completions"), [REQUEST]).outcomes
    assert outcome.error.startswith(error)
    assert bool(outcome.error) == bool(error)
    assert outcome.is_done == (name == "good")


def test_a_run_goes_on_after_every_kind_of_bad_answer() -> None:
    """One client in a closed loop, so each answer comes after the one before, and a good one at the end."""
    answers = [answer for answer, _ in ANSWERS.values()][::-1]
    outcomes: list[Outcome] = []

    async def run(target: Target) -> LoadResult:
        load = LoadRun(target, iter([REQUEST] * len(answers)), 1e9)
        load.outcomes = outcomes
        return await load.run((), 1, 0.0)

    with HostileServer(answers) as server, suppress(RuntimeError):  # the requests come to their end
        asyncio.run(run(Target(server.url, "m", "completions")))
    assert [bool(outcome.error) for outcome in outcomes] == [True] * (len(answers) - 1) + [False]


def test_a_server_that_is_not_there_fails_every_request_of_an_open_loop() -> None:
    with HostileServer([]) as server:
        url = server.url
    found: Any = run_batch(Target(url, "m", "completions"), [REQUEST] * 3)
    assert [(outcome.status, outcome.is_done) for outcome in found.outcomes] == [(0, False)] * 3
    assert all("refused" in outcome.error.lower() or "Connect" in outcome.error for outcome in found.outcomes)
