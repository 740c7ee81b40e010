"""Stage: shows chapters and scenes on a terminal.

On a terminal, the pictures of a scene are drawn one over another, with a pause after each; elsewhere only the last one
is printed, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TextIO

from quire.cli.demo.scene import Chapter, Picture, Scene
from quire.cli.terminal import Terminal
from quire.cli.text import BOLD, Colour, Line, Style, clip, indent, line, paragraph, span

MAX_COLUMNS = 120
MIN_COLUMNS = 20
MAX_TEXT_COLUMNS = 96
INDENT = 2
PICTURE_S = 0.1
SCENE_S = 0.35
HEADING = Style(Colour(31, 6), bold=True)
UP = "\x1b[{}A"
ERASE_LINE = "\x1b[K"
ERASE_BELOW = "\x1b[J"
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Stage:
    """Writes to a stream. `sleep` None: no pauses and no animation."""

    def __init__(self, stream: TextIO, terminal: Terminal, sleep: Callable[[float], None] | None) -> None:
        self._stream = stream
        self._terminal = terminal
        self._sleep = sleep if terminal.interactive else None
        self._columns = max(MIN_COLUMNS, min(terminal.columns, MAX_COLUMNS))

    def play(self, number: int, chapter: Chapter) -> None:
        """Show a chapter. Mutates the stream."""
        title = f" {number}  {chapter.title} "
        rule = "━" * max(0, self._columns - len(title) - 2)
        self.write([(), line(span("━━" + title + rule, HEADING)), ()])
        for scene in chapter.scenes():
            self.show(scene)

    def show(self, scene: Scene) -> None:
        """Show a scene. Mutates the stream."""
        self.write(paragraph(scene.title, self._columns - 2 * INDENT, BOLD), INDENT)
        self.say(scene.text)
        self._show_pictures(scene.pictures)
        self.write([()])
        self._pause(SCENE_S)

    def say(self, text: str) -> None:
        """Write a paragraph. Mutates the stream."""
        self.write([*paragraph(text, min(self._columns - 2 * INDENT, MAX_TEXT_COLUMNS)), ()], INDENT)

    def write(self, lines: list[Line], columns: int = 0) -> None:
        """Write lines, moved to the right by this many columns. Mutates the stream."""
        self._stream.write("".join(rendered + "\n" for rendered in self._render(lines, columns)))
        self._stream.flush()

    def _render(self, lines: list[Line], columns: int) -> list[str]:
        return [self._terminal.render(clip(drawn, self._columns)) for drawn in indent(lines, columns)]

    def _show_pictures(self, pictures: Sequence[Picture]) -> None:
        drawings = [picture(self._columns - INDENT) for picture in pictures]
        if self._sleep is None or max(map(len, drawings), default=0) >= self._terminal.rows:
            drawings = drawings[-1:]
        if len(drawings) <= 1:
            for drawing in drawings:
                self.write(drawing, INDENT)
            return
        try:
            self._stream.write(HIDE_CURSOR)
            self._animate(drawings)
        finally:
            self._stream.write(SHOW_CURSOR)
            self._stream.flush()

    def _animate(self, drawings: list[list[Line]]) -> None:
        height = 0
        for drawing in drawings:
            up = UP.format(height) if height else ""
            rendered = [text + ERASE_LINE + "\n" for text in self._render(drawing, INDENT)]
            self._stream.write(up + "".join(rendered) + ERASE_BELOW)
            self._stream.flush()
            height = len(drawing)
            self._pause(PICTURE_S)

    def _pause(self, seconds: float) -> None:
        if self._sleep is not None:
            self._sleep(seconds)
