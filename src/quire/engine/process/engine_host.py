"""The engine's own process: `python -m quire.engine.process.engine_host DESCRIPTOR`.

    main thread: reads messages ──► EngineThread: commands, then one step ──► writer thread: messages to the socket
    heart: a Beat once a second; checks that steps end and the server is alive ──► writer thread

The engine's thread never waits for the server: it queues its messages, and the writer sends them. When the connection
ends, for any reason, the engine has no clients left: the process frees its memory and ends, by force if the engine does
not finish its step. The process ignores signals to its process group (Ctrl-C in a terminal, a service manager that
stops a service): they are meant for the server, which lets requests finish first.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from importlib import import_module
from typing import Final

from quire.core.clock import Clock, SystemClock
from quire.core.errors import ExecutionError, QuireError
from quire.core.threaded_output import drain_output, thread_output
from quire.engine.client import EngineClient, SequenceUpdate
from quire.engine.commands import Command
from quire.engine.core import EngineCore
from quire.engine.process.engine_thread import EngineCallbacks, EngineThread
from quire.engine.process.heartbeat import PATIENCE, Heart, Standstill
from quire.engine.process.interrupts import MEANT_FOR_SERVER
from quire.engine.process.messages import (
    LENGTH_BYTES,
    Beat,
    Blocks,
    Configure,
    Failed,
    Live,
    Loaded,
    Message,
    Ready,
    Stats,
    ToEngine,
    body_length,
    encode_message,
    encode_updates,
    message_to_engine,
)
from quire.engine.records.live import LiveFrame
from quire.engine.records.stats import EngineStats
from quire.memory.cache_journal import CacheNews

logger = logging.getLogger("quire.engine")

LOADED_EVERY_S: Final = 0.1
CLOSING_S: Final = 10.0
FAILED, ORPHANED = 1, 3
"""Exit statuses of an engine that failed, and of one that exited because its server had ended."""


class MessageSocket:
    """Complete messages over a connected socket: read in one thread, written in another."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.num_received = 0
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="quire-writer", daemon=True)
        self._writer.start()

    def send(self, message: Message) -> None:
        """Queue a message; from any thread."""
        self.send_encoded(encode_message(message))

    def send_encoded(self, message: bytes) -> None:
        """Queue the bytes of a message; from any thread."""
        self._outgoing.put(message)

    def receive(self) -> ToEngine | None:
        """Wait for a message; None when the connection has ended."""
        head = self._read(LENGTH_BYTES)
        body = None if head is None else self._read(body_length(head))
        self.num_received += 1
        return None if body is None else message_to_engine(body)

    def close(self) -> None:
        """Send the queued messages, wait until the other end has read them and closed, then close.

        If this end closed first, a write of the other end would fail at once, and it might not read the last messages.
        """
        self._outgoing.put(None)
        self._writer.join(CLOSING_S)
        last_s = time.monotonic() + CLOSING_S
        with contextlib.suppress(OSError):  # the other end has already closed
            self._socket.shutdown(socket.SHUT_WR)
            while (left_s := last_s - time.monotonic()) > 0:
                self._socket.settimeout(left_s)
                if not self._socket.recv(1 << 16):
                    break
        self._socket.close()

    def _read(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self._socket.recv(count - len(data))
            except OSError:
                return None
            if not piece:
                return None
            data += piece
        return bytes(data)

    def _write(self) -> None:
        while (data := self._outgoing.get()) is not None:
            try:
                self._socket.sendall(data)
            except OSError:
                return  # the connection has ended; the reader notices too


class EngineHost:
    """Runs one engine for the server at the other end of a connection."""

    def __init__(self, connection: MessageSocket, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._next_loaded_s = 0.0
        self._num_delivered = 0
        self._thread: EngineThread | None = None  # once the engine is built
        self._patience = PATIENCE
        self._step, self._server = Standstill(clock), Standstill(clock)
        self._parent = os.getppid()
        self._is_orphan = False

    def run(self) -> int:
        """Serve until the connection ends; return the exit status."""
        import_module("quire.engine.factory")  # now, while the server still reads its own modules
        first = self._connection.receive()
        if not isinstance(first, Configure):
            return 0 if first is None else FAILED
        self._patience = first.patience
        heart = Heart(self._beat)
        try:
            core, ready = self._build(first)
        except (QuireError, OSError, MemoryError) as error:
            message = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
            self._connection.send(Failed(_in_one_line(message)))
            return FAILED
        client = EngineClient(core)
        callbacks = EngineCallbacks(self._deliver, self._die, self._tell, self._show, self._report)
        thread = EngineThread(client, callbacks, self._clock)
        self._thread = thread
        gc.freeze()  # these objects stay alive; do not scan every block of the pool
        gc.enable()
        self._connection.send(ready)
        self._obey(thread)
        _exit_after(CLOSING_S)
        heart.stop()
        self._thread = None  # no native object must be in use when the interpreter exits
        thread.close()
        return 0

    def _build(self, configure: Configure) -> tuple[EngineCore, Ready]:
        from quire.engine.factory import plan_engine

        blueprint = plan_engine(configure.config)
        if blueprint.masks is not None:
            blueprint.masks.open()  # so that the first grammar need not wait for the vocabulary
        blueprint = blueprint.measured(self._note_loaded)
        core = blueprint.build(self._clock, self._note_loaded, hash_key=configure.hash_key)
        return core, Ready(core.scheduler.limits, blueprint.report, blueprint.fingerprint)

    def _obey(self, thread: EngineThread) -> None:
        """Pass commands to the engine until the connection ends."""
        while True:
            match self._connection.receive():
                case Command() as command:
                    thread.send(command)
                case Beat():
                    pass
                case _:
                    return

    def _beat(self) -> None:
        """Send a beat; end this process if the server has ended, or if a step does not end."""
        self._connection.send(Beat())
        was_orphan, self._is_orphan = self._is_orphan, os.getppid() != self._parent
        if was_orphan:  # the connection is open only because another process holds it
            self._leave("the server has ended")
        if self._thread is None:
            return
        max_step_s, max_silence_s = self._patience.max_step_s, self._patience.max_silence_s
        if self._server.look(self._connection.num_received) > (max_silence_s or math.inf):
            self._leave(f"the server has been silent for {max_silence_s:g} s (max_silence_s)")
        if self._step.look(self._thread.turn) > (max_step_s or math.inf):
            logger.error("a step is stuck at:\n%s", self._thread.stack)
            self._die(f"a step took more than {max_step_s:g} s (max_step_s)")

    def _deliver(self, updates: list[SequenceUpdate]) -> None:
        for message in encode_updates(updates, self._num_delivered):
            self._connection.send_encoded(message)
            self._num_delivered += 1

    def _die(self, message: str) -> None:
        """End the process because the engine has failed, after sending the server the reason."""
        self._connection.send(Failed(_in_one_line(message)))
        self._connection.close()
        drain_output()
        os._exit(FAILED)

    def _leave(self, why: str) -> None:
        """End the process at once, without a server to notify."""
        logger.error("stopping the engine: %s", why)
        drain_output()
        os._exit(ORPHANED)

    def _tell(self, stats: EngineStats) -> None:
        self._connection.send(Stats(stats))

    def _show(self, frame: LiveFrame) -> None:
        self._connection.send(Live(frame))

    def _report(self, news: CacheNews) -> None:
        self._connection.send(Blocks(news))

    def _note_loaded(self, count: int, total: int, what: str) -> None:
        now = self._clock.now()
        if now >= self._next_loaded_s:
            self._next_loaded_s = now + LOADED_EVERY_S
            self._connection.send(Loaded(count, total, what))


def _in_one_line(message: str) -> str:
    return " ".join(message.split())


def _exit_after(seconds: float) -> None:
    """End the process by force after a delay."""
    timer = threading.Timer(seconds, os._exit, (ORPHANED,))
    timer.daemon = True
    timer.start()


def main(descriptor: int) -> int:
    """Serve over an inherited socket; return the exit status."""
    for ignored in MEANT_FOR_SERVER:
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, MEANT_FOR_SERVER)
    gc.disable()  # until the engine is built: imports and blocks make many objects, which all stay
    thread_output()
    connection = MessageSocket(socket.socket(fileno=descriptor))
    try:
        return EngineHost(connection, SystemClock()).run()
    except ExecutionError as error:  # an invalid message: the connection is unusable
        print(f"quire: error: {error}", file=sys.stderr)
        return FAILED
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
