"""Reads the turns of `quire chat`: a line, or a pasted text of several lines, is one turn.

A terminal marks pasted text (bracketed paste), and GNU readline keeps its lines together until Enter. Without either,
the lines of a paste arrive at once: lines that already wait on stdin belong to the same turn. A line that begins with a
slash is always a command of its own.
"""

from __future__ import annotations

import select
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from quire.cli.session import in_utf8

PROMPT: Final = "> "
PASTE_GAP_S: Final = 0.05
"""The longest pause between two lines of a paste; users type more slowly."""


def terminal_reader() -> Callable[[], str]:
    """Return a reader of turns from a terminal, with line editing and history. It raises EOFError at the end."""
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("set enable-bracketed-paste on")
    commands: list[str] = []

    def read() -> str:
        if commands:
            return commands.pop()
        lines = [input(PROMPT)]
        while not lines[0].startswith("/") and select.select([sys.stdin], [], [], PASTE_GAP_S)[0]:
            try:
                line = input()
            except EOFError:
                break
            if line.startswith("/"):
                commands.append(line)
                break
            lines.append(line)
        return "\n".join(lines)

    return read


def pipe_reader() -> Callable[[], str]:
    """Return a reader of lines from a pipe. It raises EOFError at the end."""

    def read() -> str:
        text = in_utf8(sys.stdin.readline)
        if not text:
            raise EOFError
        return text

    return read
