"""EngineConnection: one engine, from its start to its end, and messages to and from it.

    await start(index) ──► send(message) …   await receive() …  None: it is gone ──► await end(patience_s)

Messages come in order or not at all: a message that cannot be read, or one that is missing, ends the connection, and
nothing that an ended connection still delivers is read. So an engine that was given up for lost cannot speak again.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol

from quire.core.python_process import start_python
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
    """An engine that runs somewhere else. Use it in one event loop."""

    @property
    def process_id(self) -> int | None:
        """The process id of an engine on this machine."""
        ...

    def send(self, message: Message | Command) -> None:
        """Send a message; if the engine is gone, the message is lost."""
        ...

    async def receive(self) -> FromEngine | None:
        """Wait for a message; None when the engine is gone. Raises `ExecutionError` for what is no message."""
        ...

    async def end(self, patience_s: float) -> int:
        """Wait this long for the engine to end, then end it by force; return its exit status."""
        ...

    def kill(self) -> None:
        """End the engine by force."""
        ...


StartEngine = Callable[[int], Awaitable[EngineConnection]]
"""Starts the engine of a replica, by its number; its settings are on their way when this returns."""
StartElsewhere = Callable[[Configure], Awaitable[EngineConnection]]
"""Starts an engine with these settings on another machine."""


async def read_message(reader: asyncio.StreamReader) -> FromEngine | None:
    """Wait for a message of an engine; None when there will be no more. Raises `ExecutionError` for what is none."""
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

    @classmethod
    async def start(cls, configure: Configure, environment: Mapping[str, str] | None = None) -> LocalEngine:
        """Start a process that builds an engine. `environment` None: that of this process."""
        ours, theirs = socket.socketpair()
        try:
            arguments = ("-m", "quire.engine.process.engine_host", str(theirs.fileno()))
            process = start_python(
                *arguments, environment=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        started = cls(process, *await asyncio.open_connection(sock=ours))
        started.send(configure)
        return started

    @property
    def process_id(self) -> int:
        """The process id."""
        return self._process.pid

    def send(self, message: Message | Command) -> None:
        """Send a message; if the engine is gone, the message is lost."""
        self._home.require()  # a forked process has its parent's connection
        self._writer.write(encode_message(message))

    async def receive(self) -> FromEngine | None:
        """Wait for a message; None when the engine is gone."""
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
        """Poll for the exit status: a thread to wait in might be busy when it matters."""
        while (status := self._process.poll()) is None:
            await asyncio.sleep(LOOK_S)
        return status

    def kill(self) -> None:
        """End the process by force."""
        self._process.kill()
