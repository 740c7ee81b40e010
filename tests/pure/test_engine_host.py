"""The engine's end of its connection: messages cut anywhere, connections that end, engines that cannot be built."""

from __future__ import annotations

import asyncio
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.clock import ManualClock
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, ModelError
from quire.core.logprobs import TokenLogprobs
from quire.core.sampling_params import SamplingParams
from quire.engine.client import SequenceUpdate
from quire.engine.commands import Abort, Add, Clear, Stop
from quire.engine.process.engine_host import FAILED, EngineHost, MessageSocket
from quire.engine.process.messages import (
    LENGTH_BYTES,
    MAX_MESSAGE_BYTES,
    Beat,
    Close,
    Configure,
    Failed,
    Loaded,
    body_length,
    encode_message,
    message_from_engine,
)

TO_ENGINE = st.sampled_from(
    [
        Beat(),
        Close(),
        Clear(),
        Abort("r"),
        Stop("é", 3),
        Add("r", array("i", range(1000)), SamplingParams(seed=7)),
        Configure(EngineConfig(model="guide")),
    ]
)


@contextmanager
def connected() -> Iterator[tuple[MessageSocket, socket.socket]]:
    """The engine's end, and the socket of the server."""
    ours, theirs = socket.socketpair()
    with closing(theirs):
        end = MessageSocket(ours)
        try:
            yield end, theirs
        finally:
            theirs.close()
            end.close()


def read_all(server: socket.socket) -> list[Any]:
    """Everything that the engine has sent until it closed."""
    data = b""
    while piece := server.recv(1 << 16):
        data += piece
    found = []
    while data:
        length = body_length(data[:LENGTH_BYTES])
        found.append(message_from_engine(data[LENGTH_BYTES : LENGTH_BYTES + length]))
        data = data[LENGTH_BYTES + length :]
    return found


@given(st.lists(TO_ENGINE, max_size=5), st.lists(st.integers(0, 5000), max_size=5), st.integers(0, 5000))
def test_messages_arrive_whole_however_they_are_cut_and_a_torn_one_is_none(
    messages: list[Any], cuts: list[int], num_torn: int
) -> None:
    whole = b"".join(map(encode_message, messages))
    torn = encode_message(Add("torn", array("i", range(1000)), SamplingParams()))
    data = whole + torn[: num_torn % len(torn)]
    with connected() as (engine, server):

        def write() -> None:
            places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
            for start, end in pairwise(places):
                server.sendall(data[start:end])
            server.shutdown(socket.SHUT_WR)

        writer = threading.Thread(target=write)
        writer.start()
        received = []
        while (message := engine.receive()) is not None:
            received.append(message)
        writer.join()
        assert received == messages
        assert engine.receive() is None
        assert engine.num_received == len(messages) + 2  # the ends, too: they are news for who listens


@given(st.lists(st.text(max_size=20), max_size=6))
def test_what_is_sent_before_the_end_arrives_in_order_from_any_thread(texts: list[str]) -> None:
    with connected() as (engine, server):
        for index, text in enumerate(texts):
            engine.send(Loaded(index, len(texts), text))
        server.shutdown(socket.SHUT_WR)
        engine.close()
        assert read_all(server) == [Loaded(index, len(texts), text) for index, text in enumerate(texts)]


def test_what_is_sent_before_the_end_arrives_though_the_server_writes_meanwhile() -> None:
    """The writer of a server's event loop gives its connection up at the first error, and what was not read with it."""

    async def serve(server: socket.socket, closing: threading.Thread) -> Any:
        reader, writer = await asyncio.open_connection(sock=server)
        closing.start()
        closing.join(0.2)  # the event loop does not read meanwhile
        writer.write(encode_message(Beat()))
        try:
            data = await reader.read()
        finally:
            writer.close()
        return message_from_engine(data[LENGTH_BYTES:])

    with connected() as (engine, server):
        engine.send(Failed("the reason"))
        closing = threading.Thread(target=engine.close)
        assert asyncio.run(serve(server, closing)) == Failed("the reason")
        closing.join()


def test_a_server_that_has_gone_keeps_no_engine_waiting() -> None:
    with connected() as (engine, server):
        server.close()
        for _ in range(100):
            engine.send(Loaded(1, 2, "x" * 100_000))
        assert engine.receive() is None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((MAX_MESSAGE_BYTES + 1).to_bytes(LENGTH_BYTES, "little"), "announced a message of"),
        ((3).to_bytes(LENGTH_BYTES, "little") + b"\xff\xff\xff", "delivered an invalid message"),
        ((0).to_bytes(LENGTH_BYTES, "little"), "delivered an invalid message"),
        (encode_message(Failed("only an engine says this")), "delivered an invalid message"),
    ],
)
def test_what_is_no_message_is_an_error_of_the_connection(data: bytes, words: str) -> None:
    with connected() as (engine, server):
        server.sendall(data)
        with pytest.raises(ExecutionError, match=words):
            engine.receive()


# ---- the host -------------------------------------------------------------------------------------------------------


class UnbuiltHost(EngineHost):
    """A host whose engine cannot be built, for a reason that a test has given."""

    failure: BaseException

    def _build(self, configure: Configure) -> Any:
        raise self.failure


def run(failure: BaseException, *messages: Any) -> tuple[int, list[Any]]:
    """Run a host with messages from its server; return its status and what it said.

    Its heart does not beat, because it ends the process when the parent does.
    """
    with connected() as (engine, server), pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.process.engine_host.Heart", lambda beat: SimpleNamespace(stop=lambda: None))
        for message in messages:
            server.sendall(encode_message(message))
        server.shutdown(socket.SHUT_WR)
        host = UnbuiltHost(engine, ManualClock())
        host.failure = failure
        status = host.run()
        engine.close()
        return status, read_all(server)


CONFIGURE = Configure(EngineConfig(model="guide"))


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (ModelError("x", "No folder named x. Give one"), "No folder named x. Give one"),
        (ExecutionError("no\tmemory:\n  too\nsmall"), "no memory: too small"),
        (FileNotFoundError(2, "No such file", "weights"), "FileNotFoundError: [Errno 2] No such file: 'weights'"),
        (MemoryError(), "MemoryError:"),
    ],
)
def test_an_engine_that_cannot_be_built_is_told_in_one_line(failure: BaseException, message: str) -> None:
    assert run(failure, CONFIGURE) == (FAILED, [Failed(message)])


def test_a_mistake_of_ours_is_not_told_as_one_of_the_settings() -> None:
    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError("a mistake"), CONFIGURE)


def test_an_engine_without_settings_ends() -> None:
    unused = AssertionError("nothing is built without settings")
    assert run(unused) == (0, [])
    for message in (Beat(), Close(), Clear()):
        assert run(unused, message) == (FAILED, [])


def test_commands_are_passed_on_until_anything_else_comes() -> None:
    passed: list[Any] = []
    thread: Any = SimpleNamespace(send=passed.append)
    for last in (Close(), CONFIGURE, None):
        passed.clear()
        with connected() as (engine, server):
            for message in (Beat(), Clear(), Beat(), Abort("r"), *([] if last is None else [last, Clear()])):
                server.sendall(encode_message(message))
            server.shutdown(socket.SHUT_WR)
            EngineHost(engine, ManualClock())._obey(thread)
        assert passed == [Clear(), Abort("r")]


def test_a_step_with_more_than_a_message_holds_does_not_end_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = TokenLogprobs(-0.5, 1, array("i", [7] * 20), array("d", [-0.5] * 20))
    updates = [SequenceUpdate(name, 0, [1], [], 0, prompt_logprobs=(entry,) * 10) for name in "abcd"]
    monkeypatch.setattr("quire.engine.process.messages.MAX_MESSAGE_BYTES", 6000)
    with connected() as (engine, server):
        host = EngineHost(engine, ManualClock())
        host._deliver(updates[:1])
        host._deliver(updates)
        server.shutdown(socket.SHUT_WR)
        engine.close()
        received = read_all(server)
    assert [each.number for each in received] == list(range(len(received))) and len(received) > 2
    assert [update for each in received for update in each.updates] == [updates[0], *updates]


def test_loading_is_told_now_and_then() -> None:
    clock = ManualClock(50.0)
    with connected() as (engine, server):
        host = EngineHost(engine, clock)
        for seconds in (0.0, 0.01, 0.01, 10.0, 0.0):
            clock.advance(seconds)
            host._note_loaded(int(clock.now()), 100, "weights")
        server.shutdown(socket.SHUT_WR)
        engine.close()
        assert [message.count for message in read_all(server)] == [50, 60]
