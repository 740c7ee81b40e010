"""Handles Ctrl-C between steps, never within one: an engine interrupted while it updates its state could not go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Final

MEANT_FOR_SERVER: Final = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal or a service manager sends to a whole group of processes. An engine ignores them."""


class InterruptsDeferred:
    """Defers an interrupt in a `with` block, and raises it as KeyboardInterrupt at the end.

    Does nothing outside the main thread, which alone gets interrupts, or if the program handles interrupts itself.
    """

    def __init__(self) -> None:
        self._installed = False
        self._interrupted = False

    def __enter__(self) -> InterruptsDeferred:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._installed = True
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._interrupted and error is None:
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
