"""The progress of a run, as a line on a terminal only; and remarks, on any stream.

    simulating block_size=16  [########------------] 40 %

The total is a duration if requests are drawn, or the size of a file that is read.
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
    """Shows how much of a run is done."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        super().__init__(stream, clock)
        self._what = ""

    def begin(self, what: str) -> None:
        """Set the name of the current task. Mutates."""
        self._what = what

    def note(self, share: float) -> None:
        """Redraw the line, if it is due. Mutates the stream."""
        if self.is_due:
            done = min(1.0, share)
            num_drawn = int(WIDTH * done)
            self.draw(f"{self._what}  [{'#' * num_drawn}{'-' * (WIDTH - num_drawn)}] {100 * done:.0f} %")

    def remark(self, text: str) -> None:
        """Write a permanent line, on any stream. Mutates the stream."""
        self.close()
        print(f"quire: note: {text}", file=self._stream)

    def until(self, end_s: float) -> Callable[[int, SimulatedEngine], None]:
        """Return a watcher of a simulation whose requests arrive until a time."""
        return lambda _, engine: self.note(engine.clock.now() / end_s)

    def follow(self, file: str | int) -> io.BufferedReader:
        """Open a file by its path or descriptor, which closes with it, and report how much has been read."""
        return io.BufferedReader(_FollowedFile(file, self.note))


class _FollowedFile(io.FileIO):
    def __init__(self, file: str | int, note: Callable[[float], None]) -> None:
        super().__init__(file)
        self._size = os.fstat(self.fileno()).st_size  # 0 for a pipe, whose size is unknown
        self._num_read = 0
        self._note = note

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        num_read = super().readinto(buffer)
        self._num_read += num_read
        self._note(self._num_read / max(self._size, self._num_read, 1) if self._size else 0.0)
        return num_read
