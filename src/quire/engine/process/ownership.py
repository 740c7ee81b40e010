"""Ownership: only the process that opened an engine can use it, in one thread at a time.

    with turn: …        raises RequestStateError at once if another thread is inside, or this process was forked

Two threads in one scheduler produced wrong texts without an error. A queue would make the second thread wait for a
whole batch of the first, and `AsyncLLM` serves concurrent callers. So a second thread is refused. A forked process has
a copy of the engine's state, but not its compute threads, and shares pipes and sockets with its parent.
"""

from __future__ import annotations

import os
import threading

from quire.core.errors import RequestStateError


class Home:
    """The process that created this object."""

    def __init__(self) -> None:
        self._process_id = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, and not a fork."""
        return os.getpid() == self._process_id

    def require(self) -> None:
        """Raise `RequestStateError` in a forked process."""
        if not self.is_here:
            raise RequestStateError(
                f"this engine belongs to process {self._process_id}, from which this one was forked; "
                "open an engine in each process, or start processes with 'spawn'"
            )


class Turn:
    """A lock that does not wait: `with` raises `RequestStateError` if another thread is inside, or after a fork."""

    def __init__(self) -> None:
        self.home = Home()
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Try to take the turn, without waiting; return whether it succeeded. Then `give` must follow. Mutates."""
        return self.home.is_here and self._lock.acquire(blocking=False)

    def give(self) -> None:
        """Release the turn. Mutates."""
        self._lock.release()

    def __enter__(self) -> None:
        self.home.require()
        if not self.take():
            raise RequestStateError(
                "this LLM is in use by another thread; use it from one thread, or AsyncLLM for many callers"
            )

    def __exit__(self, *_: object) -> None:
        self.give()
