"""Clients that misbehave: requests sent byte by byte, abandoned streams, answers that are never read."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException, HTTPResponse

from quire.instruments.http.events import EventReader
from quire.instruments.http.plain import Answer

Address = tuple[str, int]


def head(method: str, path: str, headers: Mapping[str, str] | None = None, host: str = "localhost") -> bytes:
    """Return the head of a request, without checks or escapes."""
    fields = "".join(f"{name}: {value}\r\n" for name, value in {"Host": host, **(headers or {})}.items())
    return f"{method} {path} HTTP/1.1\r\n{fields}\r\n".encode("latin-1")


def send_raw(address: Address, data: bytes, *, timeout_s: float = 30.0) -> Answer:
    """Send bytes and return the answer; raises `OSError` if there is none, or if it is not HTTP.

    A server may answer before it has read everything, so a failure to send the rest is not an error.
    """
    started = time.perf_counter()
    with socket.create_connection(address, timeout=timeout_s) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server may still have answered
            connection.sendall(data)
        return read_answer(connection, started)


def read_answer(connection: socket.socket, started_s: float) -> Answer:
    """Return the answer on a connection."""
    response = HTTPResponse(connection)
    try:
        response.begin()
        return Answer.read(response, started_s)
    except HTTPException as error:
        raise ConnectionResetError(f"no answer: {error!r}") from error
    finally:
        response.close()


class Stream:
    """A request whose answer is read as it arrives, or not at all. A context manager that disconnects at its end."""

    def __init__(
        self,
        address: Address,
        path: str,
        body: Mapping[str, object],
        *,
        headers: Mapping[str, str] | None = None,
        receive_bytes: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        payload = json.dumps(body).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(payload)), **(headers or {})}
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.connection.settimeout(timeout_s)
        if receive_bytes is not None:  # before connecting: afterwards it cannot reduce the window
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.connection.connect(address)
        self.connection.sendall(head("POST", path, fields) + payload)
        self._reader = EventReader()
        self._response: HTTPResponse | None = None

    @property
    def status(self) -> int:
        """The status of the answer; 0 before it was read."""
        return 0 if self._response is None else self._response.status

    def read_events(self, count: int) -> list[bytes]:
        """Wait for this many events, or for the end of the connection; return the events."""
        if self._response is None:
            self._response = HTTPResponse(self.connection)
            self._response.begin()
        found: list[bytes] = []
        while len(found) < count:
            piece = self._response.read1(65536)
            if not piece:
                break
            found += self._reader.feed(piece)
        return found

    def read_answer(self) -> Answer:
        """Read the complete answer, and return it."""
        return read_answer(self.connection, time.perf_counter())

    def leave(self) -> None:
        """Close the connection at once, like a killed client."""
        if self._response is not None:
            self._response.close()
        self.connection.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()
