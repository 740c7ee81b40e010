"""The progress of a run as a line on a terminal, and nothing elsewhere; and remarks, everywhere.

    simulating block_size=16  [########------------] 40 %

What there is to do is known as a time, where requests are drawn for so long, or as the bytes of a file that is read.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import TextIO

from quire.core.clock import Clock
from quire.engine.progress import StatusLine
from quire.simulate.replica import SimulatedEngine

WIDTH = 20


class ProgressLine(StatusLine):
    """Says how much of a run is done."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        super().__init__(stream, clock)
        self._what = ""

    def begin(self, what: str) -> None:
        """Say what is done from now on. Mutates."""
        self._what = what

    def note(self, share: float) -> None:
        """Draw now and then. Mutates the stream."""
        if self.is_due:
            done = min(1.0, share)
            num_drawn = int(WIDTH * done)
            self.draw(f"{self._what}  [{'#' * num_drawn}{'-' * (WIDTH - num_drawn)}] {100 * done:.0f} %")

    def remark(self, text: str) -> None:
        """Write a line that stays, on a terminal or not. Mutates the stream."""
        self.close()
        print(f"quire: note: {text}", file=self._stream)

    def until(self, end_s: float) -> Callable[[int, SimulatedEngine], None]:
        """Return a watcher of a simulation whose requests come until a time."""
        return lambda _, engine: self.note(engine.clock.now() / end_s)

    def follow(self, file: str | int) -> io.BufferedReader:
        """Open a file, by its path or by a descriptor to be closed, and report how much has been read."""
        return io.BufferedReader(_FollowedFile(file, self.note))


class _FollowedFile(io.FileIO):
    def __init__(self, file: str | int, note: Callable[[float], None]) -> None:
        super().__init__(file)
        self._size = os.fstat(self.fileno()).st_size  # 0 of a pipe, of which nobody knows the end
        self._num_read = 0
        self._note = note

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        num_read = super().readinto(buffer)
        self._num_read += num_read
        self._note(self._num_read / max(self._size, self._num_read, 1) if self._size else 0.0)
        return num_read
