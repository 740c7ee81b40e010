"""RemoteEngine: an engine on another machine, reached through a relay there.

    Replica ── send, receive, end, kill ──► RemoteEngine ── RelayLink ──► Relay ──► engine

All messages sent in one turn of the event loop travel in one call. The engine's output is one ordered stream of bytes,
which this module splits into messages. The server never waits for an engine, nor an engine for the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol

from quire.core.errors import ExecutionError
from quire.core.request import CacheScope
from quire.engine.commands import Command
from quire.engine.process.connection import read_message
from quire.engine.process.messages import Configure, FromEngine, Message, encode_message
from quire.engine.process.ownership import Home
from quire.serve.replicas.landing import Landed

ROUND_TRIP_S: Final = 2.0
"""How long a relay may take to answer, in addition to a wait that was requested."""
LOST: Final = -9
"""The exit status of an engine whose relay does not report it."""
LandingStore = tuple[str, int, int]
"""A store, the maximum number of blocks, and the model's vocabulary size."""


class RelayLink(Protocol):
    """The link to a relay, in both directions."""

    def frames(self) -> AsyncIterator[bytes]:
        """Start the relay's engine, and yield its output; raises `ExecutionError` when the relay is gone."""
        ...

    def send(self, number: int, data: bytes) -> None:
        """Send bytes; if the relay is gone, they are lost. Numbers start at 0."""
        ...

    async def end(self, patience_s: float) -> int:
        """End the relay's engine; return its exit status. Raises `ExecutionError` if the relay is gone."""
        ...

    def lend(self, store: str, slots: tuple[int, ...], tokens: bytes, scope: CacheScope) -> object:
        """Make the relay read the blocks of some tokens from a store; return an argument for a relay's `land`."""
        ...

    async def land(self, number: int, lent: object, store: LandingStore, scope: CacheScope) -> Landed:
        """Make the relay write a lent bundle next to a store of its machine; raises `FetchError`, `ExecutionError`."""
        ...

    def take_off(self, number: int) -> None:
        """Make the relay delete the bundle of a number, even if it lands later."""
        ...

    def kill(self) -> None:
        """Kill the relay."""
        ...


class RemoteEngine:
    """An engine behind a relay, reached by `link`. Implements `EngineConnection`; use it in one event loop."""

    def __init__(self, link: RelayLink, configure: Configure) -> None:
        self.link = link
        self._reader = asyncio.StreamReader()
        self._failure = ""
        self._is_killed = self._is_heard = False
        self._outgoing: list[bytes] = []
        self._num_sent = 0
        self._home = Home()
        self._carrier = asyncio.create_task(self._carry(), name="quire-relay")
        self.send(configure)

    @property
    def process_id(self) -> None:
        """None: the process is on another machine."""
        return None

    def send(self, message: Message | Command) -> None:
        """Send a message; if the engine is gone, the message is lost."""
        self._home.require()
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(encode_message(message))

    async def receive(self) -> FromEngine | None:
        """Wait for a message; return None when the engine is gone. Raises `ExecutionError` when its relay is gone."""
        message = await read_message(self._reader)
        if message is None and self._failure:
            raise ExecutionError(self._failure)
        return message

    async def end(self, patience_s: float) -> int:
        """Wait this long for the engine to end, then kill it; return its exit status.

        Does not wait for an engine that has sent nothing yet: there may be no machine for it.
        """
        if not self._home.is_here:
            return 0
        self._flush()
        patience_s = patience_s if self._is_heard and not self._is_killed else 0.0
        try:
            async with asyncio.timeout(patience_s + ROUND_TRIP_S):
                return await self.link.end(patience_s)
        except (TimeoutError, ExecutionError):
            return LOST
        finally:
            self._carrier.cancel()
            self.link.kill()

    def kill(self) -> None:
        """Stop listening to the engine; `end` kills it."""
        self._is_killed = True
        self._carrier.cancel()

    def _flush(self) -> None:
        if self._outgoing:
            self.link.send(self._num_sent, b"".join(self._outgoing))
            self._num_sent += 1
            self._outgoing.clear()

    async def _carry(self) -> None:
        """Read the stream until it ends."""
        try:
            async for frame in self.link.frames():
                self._is_heard = True
                self._reader.feed_data(frame)
        except ExecutionError as error:
            self._failure = str(error)
        finally:
            self._reader.feed_eof()
