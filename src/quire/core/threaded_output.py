"""ThreadedOutput: a stream whose thread writes to a descriptor, so that no log line waits for a reader.

    print, logging, a traceback ──► queue of at most 1 MiB ──► thread ──► stdout or stderr

A pipe that is not read is full after 64 KiB, and the next write to it blocks forever. In a server that write is a log
line, and the event loop or the engine waits with it. Here only the thread waits. Text that finds no room is dropped,
and the next line written reports how many pieces were dropped. Native code that writes to the descriptor itself still
waits.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
import time
from typing import Final

MAX_WAITING_BYTES: Final = 1 << 20
LAST_WORDS_S: Final = 1.0
"""Seconds that the process waits at its end for its last output to be read."""


class ThreadedOutput(io.TextIOBase):
    """A text stream like `sys.stderr`, whose `write` and `flush` return at once. Threads may share it."""

    def __init__(self, descriptor: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        self._descriptor = descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: list[bytes] = []
        self._num_waiting_bytes = 0  # with the bytes that are being written
        self._num_dropped = 0
        self._changed = threading.Condition()  # an RLock: a finalizer may write while this thread does
        threading.Thread(target=self._run, name="quire-output", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of text."""
        return "utf-8"

    def write(self, text: str) -> int:
        """Queue text for writing; drop and count it if too much is queued. Mutates."""
        data = text.encode(errors="backslashreplace")
        with self._changed:
            if self._num_waiting_bytes + len(data) > self._max_waiting_bytes:
                self._num_dropped += 1
            elif data:
                self._waiting.append(data)
                self._num_waiting_bytes += len(data)
                self._changed.notify_all()
        return len(text)

    def drain(self, timeout_s: float = LAST_WORDS_S) -> None:
        """Wait until everything is written, at most for `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting_bytes, timeout_s)

    def writable(self) -> bool:
        """Return True."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether the descriptor is a terminal."""
        return os.isatty(self._descriptor)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = b"".join(self._waiting)  # all at once: after each write this thread waits for the interpreter
                self._waiting.clear()
                num_dropped, self._num_dropped = self._num_dropped, 0
            if num_dropped:
                _write(self._descriptor, b"quire: %d pieces of output were dropped here: slow reader\n" % num_dropped)
            _write(self._descriptor, data)
            with self._changed:
                self._num_waiting_bytes -= len(data)
                self._changed.notify_all()


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes; drop them if the descriptor no longer has a reader."""
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another process that shares the descriptor made it non-blocking
            select.select([], [descriptor], [])
        except OSError:
            return


def thread_output() -> None:
    """From now on, let a thread write everything that this process prints and logs. Mutates `sys`."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            stream.flush()
            setattr(sys, name, ThreadedOutput(stream.fileno()))
    atexit.register(drain_output)


def drain_output() -> None:
    """Wait a moment until all printed and logged text is written, before the process ends."""
    end_s = time.monotonic() + LAST_WORDS_S
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, ThreadedOutput):
            stream.drain(max(end_s - time.monotonic(), 0.0))
