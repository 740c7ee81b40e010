"""A server in a thread of the test, and what comes back for a call."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from quire.serve.server import Server


@dataclass(frozen=True)
class Answer:
    """What came back for a call."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @classmethod
    def of(cls, response: http.client.HTTPResponse) -> Answer:
        return cls(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())

    @property
    def value(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.value["error"]

    @property
    def events(self) -> list[Any]:
        """The data of a stream, less its end."""
        return [json.loads(data) for data in self._data if data != "[DONE]"]

    @property
    def lines(self) -> list[Any]:
        """The objects of a stream of lines."""
        assert self.body.endswith(b"\n")
        return [json.loads(line) for line in self.body.splitlines()]

    @property
    def is_done(self) -> bool:
        return self._data[-1] == "[DONE]"

    @property
    def _data(self) -> list[str]:
        lines = self.body.decode().splitlines()
        return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@dataclass(frozen=True)
class ServerThread:
    """A server at work, and the event loop that it belongs to."""

    server: Server
    loop: asyncio.AbstractEventLoop
    thread: threading.Thread

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.stop)


@contextmanager
def in_thread(server: Server, listener: socket.socket) -> Iterator[ServerThread]:
    """Run a server meanwhile; it has ended when the context is left, and what it raised is raised then."""
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []
    failures: list[BaseException] = []

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()
        await server.run(listener)

    def run_all() -> None:
        try:
            asyncio.run(run())
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run_all, daemon=True)
    thread.start()
    assert started.wait(300)
    running = ServerThread(server, loops[0], thread)
    try:
        yield running
    finally:
        if thread.is_alive():
            running.stop()
            thread.join(300)
        listener.close()
    assert not thread.is_alive()
    if failures:
        raise failures[0]
