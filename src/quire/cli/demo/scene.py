"""Chapter and Scene: the parts of a story. They do not know the terminal.

A scene says in a sentence what happens and why, and has pictures: the last one stays, those before it are shown one
after another on a terminal, so that one sees it happen. A picture is drawn when it is known how wide it may be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.cli.text import Line

Picture = Callable[[int], list[Line]]
"""Draws itself into this many columns."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A title of a few words, what happens and why, and how it looks."""

    title: str
    text: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, slots=True)
class Chapter:
    """Scenes on one idea, made one after another while they are shown."""

    title: str
    scenes: Callable[[], Iterator[Scene]]
