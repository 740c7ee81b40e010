"""Relay: a process on a machine of the cluster that starts an engine there and passes its bytes on unread.

    server: RemoteEngine ── send(number, bytes) ──► Relay ── socketpair ──► engine_host
                         ◄── frames(): one stream ──      ◄──────────────

A relay has one engine and ends after it: a replica's next epoch has another relay. So no message of an epoch arrives
after it. Only the server starts an engine: a relay that Ray has restarted has none, and is ended. Ray ends a relay
whose server is gone. If Ray does not notice, the engine does: without heartbeats it ends (`heartbeat`), and then its
relay.

Calls can arrive out of order, because long ones take another path; so they are numbered.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quire.core.errors import ExecutionError
from quire.core.kept_block import FetchError
from quire.core.python_process import start_python
from quire.core.request import CacheScope

if TYPE_CHECKING:
    from quire.serve.replicas.landing import Landed, Landing

FRAME_BYTES: Final = 4 << 20
LOOK_S: Final = 0.01
PIECE_BYTES: Final = 1 << 20
MOST_LENT_BYTES: Final = 1 << 30
"""The maximum bundle, which is in the memory of the relay and of Ray."""
CLUSTER_VARIABLES: Final = "RAY_"


class Relay:
    """Starts an engine, and passes bytes to and from it. Its methods are called through Ray, in one event loop.

    `folder`: the server's working folder; relative paths in settings start there, if it exists here. `note_end` is
    called when the engine is gone.
    """

    def __init__(self, folder: str, note_end: Callable[[], None]) -> None:
        self._folder = folder
        self._note_end = note_end
        self._early: dict[int, bytes] = {}
        self._landings: dict[int, Landing] = {}
        self._last_taken_off = 0
        self._num_sent = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def frames(self) -> AsyncIterator[bytes]:
        """Start the engine, and yield its output until it is gone. Mutates."""
        if self._process is not None:
            raise ExecutionError("a relay starts one engine only")
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = start_python(
                *("-m", "quire.engine.process.engine_host", str(theirs.fileno())),
                environment=engine_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                cwd=self._folder if os.path.isdir(self._folder) else None,
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._write()
        try:
            while frame := await reader.read(FRAME_BYTES):
                yield frame
        except ConnectionError:
            pass  # the engine ended without reading all input
        finally:
            self._note_end()

    async def send(self, number: int, data: bytes) -> None:
        """Pass bytes to the engine, in the order of their numbers. Mutates."""
        self._early[number] = data
        self._write()

    async def end(self, patience_s: float) -> int:
        """Wait this long for the engine to end, then kill it; return its exit status. Mutates."""
        if self._process is None:
            return 0
        if self._writer is not None:
            self._writer.close()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + patience_s
        while (status := self._process.poll()) is None:
            if loop.time() >= end_s:
                self._process.kill()
            await asyncio.sleep(LOOK_S)
        return status

    async def lend(self, store: str, slots: tuple[int, ...], tokens: bytes, scope: CacheScope) -> bytes:
        """Return the bundle of some tokens, from a store of this machine; raises `FetchError`. Does not mutate."""
        from quire.serve.replicas.landing import read_chain  # late: most relays only pass messages, without numpy

        path = self._path(store)

        def read() -> bytes:
            data = bytearray()
            for piece in read_chain(path, slots, tokens, scope):
                data += piece
                if len(data) > MOST_LENT_BYTES:
                    raise FetchError("too large")
            return bytes(data)

        return await asyncio.to_thread(read)

    async def land(self, number: int, lent: bytes, store: tuple[str, int, int], scope: CacheScope) -> Landed:
        """Write a bundle next to a store of this machine, until `take_off`; raises `FetchError`. Mutates."""
        from quire.serve.replicas.landing import Landing

        landing = Landing(self._path(store[0]), *store[1:])
        pieces = (lent[at : at + PIECE_BYTES] for at in range(0, len(lent), PIECE_BYTES))
        try:
            landed = await asyncio.to_thread(landing.take, pieces, scope)
            if number <= self._last_taken_off:
                raise FetchError("left")
        except BaseException:
            landing.close()
            raise
        self._landings[number] = landing
        return landed

    async def take_off(self, number: int) -> None:
        """Delete the bundle of a number, even if it lands later: this call may arrive first. Mutates."""
        self._last_taken_off = max(number, self._last_taken_off)
        landing = self._landings.pop(number, None)
        if landing is not None:
            landing.close()

    def _path(self, store: str) -> Path:
        return Path(self._folder if os.path.isdir(self._folder) else "", store)

    def _write(self) -> None:
        while self._writer is not None and self._num_sent in self._early:
            self._writer.write(self._early.pop(self._num_sent))
            self._num_sent += 1


def engine_environment() -> dict[str, str]:
    """Return the environment of an engine: without the cluster's variables, above all its token."""
    return {name: value for name, value in os.environ.items() if not name.startswith(CLUSTER_VARIABLES)}
