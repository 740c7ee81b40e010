"""EngineConnection: one engine, from its start to its end, and messages to and from it.

    WaitingHost() ──► await engine(settings) ──► send(message) …   await receive() … None: it has ended ──► await end()
    the process starts      it builds

Messages arrive in order or not at all: an unreadable or missing message ends the connection, and nothing is read from
an ended connection. So no message of a lost engine has an effect.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from quire.engine.commands import Command
from quire.engine.process.messages import (
    LENGTH_BYTES,
    Configure,
    FromEngine,
    Message,
    body_length,
    encode_message,
    message_from_engine,
)
from quire.engine.process.ownership import Home

LOOK_S: Final = 0.01


class EngineConnection(Protocol):
    """A connection to an engine in another process. Use it in one event loop."""

    @property
    def process_id(self) -> int | None:
        """The process id of the engine; None if it is on another machine."""
        ...

    def send(self, message: Message | Command) -> None:
        """Send a message; if the engine has ended, the message is lost."""
        ...

    async def receive(self) -> FromEngine | None:
        """Wait for a message; None when the engine has ended. Raises `ExecutionError` for an invalid message."""
        ...

    async def end(self, patience_s: float) -> int:
        """Wait this long for the engine to end, then kill it; return its exit status."""
        ...

    def kill(self) -> None:
        """Kill the engine."""
        ...


StartEngine = Callable[[int], Awaitable[EngineConnection]]
"""Starts the engine of a replica, by its number, and sends its settings."""
StartElsewhere = Callable[[Configure], Awaitable[EngineConnection]]
"""Starts an engine with these settings on another machine."""


async def read_message(reader: asyncio.StreamReader) -> FromEngine | None:
    """Wait for an engine's message; None when the connection has ended. Raises `ExecutionError` for an invalid one."""
    try:
        head = await reader.readexactly(LENGTH_BYTES)
        return message_from_engine(await reader.readexactly(body_length(head)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class LocalEngine:
    """An engine in another process of this machine, over a pair of sockets. Implements `EngineConnection`."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._home = Home()

    @property
    def process_id(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Message | Command) -> None:
        """Send a message; if the engine has ended, the message is lost."""
        self._home.require()  # in a forked process the connection is the parent's
        self._writer.write(encode_message(message))

    async def receive(self) -> FromEngine | None:
        """Wait for a message; None when the engine has ended."""
        return await read_message(self._reader)

    async def end(self, patience_s: float) -> int:
        """Wait this long for the process to end, then kill it; return its exit status. Does nothing after a fork."""
        if not self._home.is_here:
            return 0
        self._writer.close()
        try:
            async with asyncio.timeout(patience_s):
                return await self._ended()
        except TimeoutError:
            self._process.kill()
            return await self._ended()

    async def _ended(self) -> int:
        """Poll for the exit status: a thread pool to wait in could be busy."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(LOOK_S)
        return status

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()
