"""The client of the benchmarks, against servers that say what a test wants: in pieces, twice, not at all."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

import pytest

from quire.core.errors import ExecutionError, InvalidValueError
from quire.instruments.http.connection import HttpClient
from quire.instruments.http.plain import ask
from quire.instruments.http.sockets import Stream, send_raw

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Name: Value\r\n\r\nok"
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 3\r\nContent-Length: 4\r\n\r\nbusy"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\n0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok"


class Server:
    """Serves connection after connection with what it was given: for each request, pieces and a pause between them."""

    def __init__(self, *connections: Sequence[Sequence[bytes]]) -> None:
        self._connections = list(connections)
        self.requests: list[list[bytes]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> HttpClient:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.client = HttpClient(f"http://127.0.0.1:{port}/v1", headers={"Authorization": "Bearer key"})
        return self.client

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self._server.close()
        await asyncio.gather(*self._tasks)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        with suppress(ConnectionError):  # clients leave
            await self._answer(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen: list[bytes] = []
        self.requests.append(seen)
        for pieces in self._connections.pop(0):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            seen.append(head + await reader.readexactly(length))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.005)


def test_exchanges_share_a_connection() -> None:
    async def run() -> None:
        server = Server([[GOOD], [BUSY]])
        async with server as client:
            request = client.post_request("/v1/completions", b"{}")
            first, second = await client.exchange(request), await client.exchange(request)
            assert (first.status, bytes(first.body), first.headers["x-name"]) == (200, b"ok", "Value")
            assert (second.status, bytes(second.body), second.headers["retry-after"]) == (503, b"busy", "3")
        [[one, other]] = server.requests
        assert one == other
        assert one.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
        assert b"\r\nAuthorization: Bearer key\r\n" in one and one.endswith(b"\r\n\r\n{}")

    asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
def test_a_stream_is_taken_as_it_comes(size: int) -> None:
    async def run() -> None:
        pieces = [CHUNKED[at : at + size] for at in range(0, len(CHUNKED), size)]
        taken: list[bytes] = []
        async with Server([pieces]) as client:
            reply = await client.exchange(client.post_request("/v1/x", b""), taken.append)
        assert b"".join(taken) == b"data: a\n\ndata: b\n\n" and not reply.body and reply.is_complete

    asyncio.run(run())


def test_an_error_is_not_taken_for_a_stream() -> None:
    async def run() -> None:
        taken: list[bytes] = []
        async with Server([[BUSY]]) as client:
            reply = await client.exchange(client.post_request("/v1/x", b""), taken.append)
        assert bytes(reply.body) == b"busy" and not taken

    asyncio.run(run())


def test_a_connection_that_was_closed_while_idle_is_replaced() -> None:
    async def run() -> None:
        server = Server([[GOOD]], [[GOOD]], [[LAST]], [[GOOD]])
        async with server as client:
            request = client.post_request("/v1/x", b"")
            for _ in range(4):
                assert (await client.exchange(request)).status == 200
        assert [len(requests) for requests in server.requests] == [1, 1, 1, 1]

    asyncio.run(run())


@pytest.mark.parametrize("status", [b"200 OK", b"404 Not Found"])
@pytest.mark.parametrize("body", [b"", b"data: a\n\ndata: b\n\n"])
def test_a_body_without_a_length_ends_with_the_connection(status: bytes, body: bytes) -> None:
    async def run() -> None:
        server = Server([[b"HTTP/1.1 " + status + b"\r\n\r\n", body[:5], body[5:]]], [[GOOD]])
        async with server as client:
            request = client.post_request("/v1/x", b"")
            reply = await client.exchange(request)
            assert (bytes(reply.body), reply.is_complete) == (body, True)
            assert bytes((await client.exchange(request)).body) == b"ok"  # on a new connection

    asyncio.run(run())


def test_a_body_without_a_length_is_lost_with_a_connection_that_breaks() -> None:
    async def run() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata")
            await writer.drain()
            await asyncio.sleep(0.05)  # time to read the beginning
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()  # a reset, not an end

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            client = HttpClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            with pytest.raises(ConnectionError):
                await client.exchange(client.post_request("/v1/x", b""))

    asyncio.run(run())


@pytest.mark.parametrize("answer", [b"", GOOD[:20], GOOD[:-1], CHUNKED[:-5], b"no HTTP at all\r\n\r\n"])
def test_a_reply_that_does_not_end_is_an_error(answer: bytes) -> None:
    async def run() -> None:
        async with Server([[answer]]) as client:
            with pytest.raises(ConnectionError):
                await client.exchange(client.post_request("/v1/x", b""))

    asyncio.run(run())


def test_an_exchange_that_is_cancelled_leaves() -> None:
    async def run() -> None:
        server = Server([[GOOD[:-1], GOOD[-1:]]], [[GOOD]])
        async with server as client:
            request = client.post_request("/v1/x", b"")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.exchange(request), 0.002)
            assert (await client.exchange(request)).status == 200
        assert len(server.requests) == 2

    asyncio.run(run())


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host?x=1"])
def test_a_url_must_be_one(url: str) -> None:
    with pytest.raises(InvalidValueError):
        HttpClient(url)


# ---- clients that block ---------------------------------------------------------------------------------------------


def serve_once(answer: bytes) -> tuple[str, int]:
    """Return the address of a server that answers one connection with these bytes, whatever is asked."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with listener, listener.accept()[0] as connection:
            connection.recv(65536)
            connection.sendall(answer)

    threading.Thread(target=run, daemon=True).start()
    address: tuple[str, int] = listener.getsockname()
    return address


def test_a_question_has_an_answer() -> None:
    body = b'{"error": {"message": "no"}}'
    host, port = serve_once(b"HTTP/1.1 400 Bad\r\nContent-Length: %d\r\nX-A: B\r\n\r\n" % len(body) + body)
    answer = ask(f"http://{host}:{port}/v1/x?y=z", {"a": 1})
    assert answer.status == 400 and answer.headers["x-a"] == "B" and answer.seconds > 0
    assert answer.error == {"message": "no"}


def test_what_is_no_json_is_an_error() -> None:
    host, port = serve_once(GOOD)
    answer = ask(f"http://{host}:{port}/")
    assert answer.body == b"ok" and answer.error == {}
    with pytest.raises(ExecutionError):
        answer.json()


def test_raw_bytes_are_sent_as_they_are() -> None:
    assert send_raw(serve_once(BUSY), b"not even HTTP\r\n\r\n").status == 503
    with pytest.raises(OSError, match="no answer"):
        send_raw(serve_once(b""), b"GET / HTTP/1.1\r\n\r\n")


def test_events_of_a_stream_are_read_as_they_come() -> None:
    with Stream(serve_once(CHUNKED), "/v1/x", {"a": 1}) as stream:
        assert stream.read_events(1) + stream.read_events(5) == [b"a", b"b"]
