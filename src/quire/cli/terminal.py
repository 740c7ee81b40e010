"""What the terminal can show, and how styled text is written to it.

Colour is for terminals: NO_COLOR switches it off, FORCE_COLOR on, and the option --color overrides both. Whether blocks
and lines can be drawn depends only on the stream's encoding.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from quire.cli.text import ASCII_FORMS, Colour, Line, Span, plain

DRAWN = "".join(map(chr, ASCII_FORMS))
"""Every character beyond ASCII that the command line draws."""


@dataclass(frozen=True, slots=True)
class Terminal:
    """The abilities of a stream. `num_colours`: 0, 16 or 256; `interactive`: a terminal, whose lines can be redrawn."""

    columns: int = 80
    rows: int = 24
    num_colours: int = 0
    unicode: bool = True
    interactive: bool = False

    def render(self, drawn: Line) -> str:
        """Return a line as characters and escape codes.

        >>> from quire.cli.text import BOLD, line, span
        >>> Terminal(unicode=False).render(line("3", span("×", BOLD)))
        '3x'
        """
        text = "".join(map(self._styled, drawn)) if self.num_colours else plain(drawn)
        return (text if self.unicode else text.translate(ASCII_FORMS)).rstrip(" ")

    def _styled(self, part: Span) -> str:
        style = part.style
        codes = ["1"] if style.bold else []
        if style.ink is not None:
            codes.append(self._colour_code(style.ink, 30))
        if style.ground is not None:
            codes.append(self._colour_code(style.ground, 40))
        return f"\x1b[{';'.join(codes)}m{part.text}\x1b[0m" if codes else part.text

    def _colour_code(self, colour: Colour, base: int) -> str:
        if self.num_colours >= 256:
            return f"{base + 8};5;{colour.rich}"
        return str(base + colour.plain if colour.plain < 8 else base + 60 + colour.plain - 8)


def detect(stream: TextIO, environ: Mapping[str, str], color: str = "auto") -> Terminal:
    """Return what a stream can show. `color` is auto, always or never. Does not mutate."""
    size = shutil.get_terminal_size()
    is_terminal = stream.isatty()
    return Terminal(
        columns=size.columns,
        rows=size.lines,
        num_colours=_num_colours(environ) if _wants_colour(is_terminal, environ, color) else 0,
        unicode=_can_encode(stream, DRAWN),
        interactive=is_terminal and environ.get("TERM") != "dumb",
    )


def add_color_option(parser: argparse.ArgumentParser) -> None:
    """Give a command the option --color. Mutates the parser."""
    parser.add_argument(
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="colour: auto (the default: on a terminal, unless NO_COLOR or FORCE_COLOR is set), always, or never",
    )


def _wants_colour(is_terminal: bool, environ: Mapping[str, str], color: str) -> bool:
    if color != "auto":
        return color == "always"
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return is_terminal and environ.get("TERM") != "dumb"


def _num_colours(environ: Mapping[str, str]) -> int:
    """Return 256, except for terminals that are known to have fewer."""
    term = environ.get("TERM", "")
    if environ.get("COLORTERM") or "256" in term:
        return 256
    return 16 if term in ("linux", "ansi", "vt100", "vt220", "cygwin", "xterm-color", "xterm-16color") else 256


def _can_encode(stream: TextIO, text: str) -> bool:
    try:
        text.encode(stream.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
