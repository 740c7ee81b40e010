"""Progress in one line of a terminal: loading a model, or running many prompts."""

from __future__ import annotations

from typing import TextIO

from quire.core.byte_sizes import format_bytes
from quire.core.clock import Clock
from quire.engine.text.output_processor import RequestText

REDRAWN_AFTER_S = 0.1
SHOWN_AFTER_S = 0.5
BEGIN_OF_LINE, ERASE_REST = "\r", "\x1b[K"


class StatusLine:
    """A line that is redrawn, once half a second has passed; only if the stream is a terminal."""

    def __init__(self, stream: TextIO, clock: Clock) -> None:
        self._stream = stream
        self._clock = clock
        self._is_shown = stream.isatty()
        self._is_drawn = False
        self._next_s = clock.now() + SHOWN_AFTER_S

    @property
    def is_due(self) -> bool:
        """Whether it is time to draw."""
        return self._is_shown and self._clock.now() >= self._next_s

    def draw(self, text: str) -> None:
        """Draw a text in place of the last one. Mutates the stream."""
        self._is_drawn = True
        self._next_s = self._clock.now() + REDRAWN_AFTER_S
        self._stream.write(BEGIN_OF_LINE + text + ERASE_REST)
        self._stream.flush()

    def close(self) -> None:
        """Clear the line. Mutates the stream."""
        if self._is_drawn:
            self._stream.write(BEGIN_OF_LINE + ERASE_REST)
            self._stream.flush()
            self._is_drawn = False


class LoadingLine(StatusLine):
    """Shows the start of an engine: loading 512 MiB of 1.1 GiB, 45 %; then, on a GPU, recording graphs 3/11."""

    def note(self, count: int, total: int, what: str) -> None:
        """Redraw the line if it is due. Mutates the stream."""
        if self.is_due:
            loaded = f"loading {format_bytes(count)} of {format_bytes(total)}, {100 * count // max(total, 1)} %"
            self.draw(loaded if what == "weights" else f"recording {what} {count}/{total}")


class ProgressBar:
    """Redraws its line at most ten times a second; only if the stream is a terminal.

    Processed prompts 12/64, 3.4k tok/s in, 512 tok/s out
    """

    def __init__(self, num_prompts: int, stream: TextIO, clock: Clock) -> None:
        self._num_prompts = num_prompts
        self._stream = stream
        self._clock = clock
        self._is_shown = num_prompts > 0 and stream.isatty()
        self._start_s = self._drawn_s = clock.now()
        self._num_finished = self._num_read = self._num_written = 0

    def note(self, request: RequestText) -> None:
        """Count a request's progress, and redraw the line if it is due. Mutates."""
        if not self._is_shown:
            return
        if request.finished:
            self._num_finished += 1
            self._num_read += request.num_prompt_tokens
            self._num_written += request.metrics.num_generated_tokens
        now = self._clock.now()
        if now - self._drawn_s >= REDRAWN_AFTER_S:
            self._draw(now)

    def close(self) -> None:
        """Redraw the line for the last time and end it. Mutates the stream."""
        if self._is_shown:
            self._draw(self._clock.now())
            self._stream.write("\n")
            self._stream.flush()
            self._is_shown = False

    def _draw(self, now: float) -> None:
        self._drawn_s = now
        elapsed = max(now - self._start_s, 1e-9)
        rates = (
            f"{short_number(self._num_read / elapsed)} tok/s in, {short_number(self._num_written / elapsed)} tok/s out"
        )
        text = f"Processed prompts {self._num_finished}/{self._num_prompts}, {rates}"
        self._stream.write(BEGIN_OF_LINE + text + ERASE_REST)
        self._stream.flush()


def short_number(value: float) -> str:
    """Return a short form of a number, with a unit if it is large.

    >>> short_number(7.25), short_number(512.4), short_number(3412), short_number(2.5e6)
    ('7.2', '512', '3.4k', '2.5M')
    """
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"
