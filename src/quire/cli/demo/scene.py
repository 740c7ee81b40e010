"""Chapter and Scene: the parts of a story, independent of the terminal.

A scene describes an event and its reason in a few sentences, and has pictures. A terminal shows the pictures one after
another, as an animation, and keeps the last one. A picture is drawn once the width is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.cli.text import Line

Picture = Callable[[int], list[Line]]
"""Draws itself into this many columns."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A short title, a text on what happens and why, and pictures."""

    title: str
    text: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, slots=True)
class Chapter:
    """Scenes about one idea. Each is made when it is shown."""

    title: str
    scenes: Callable[[], Iterator[Scene]]
