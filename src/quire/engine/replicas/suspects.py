"""Suspects: finds the request that kills engines, so that it ends alone.

An engine that dies says nothing of who did it: every part that it had is a suspect. What `Isolation` does with a failed
step is done here with engines, and at the price of an engine each time.

    first death      its parts go on in two halves, in different engines where there are
    second death     each of its parts goes on alone, one after another, in an engine that has nothing else
    alone, at its third death     it is at fault, and ends with an error; all others go on

A part on trial has passed once it is some tokens past the place at which its engine died: 16, and twice as many with
each further death, so that one that kills an engine now and then is found as well. It keeps its count: nobody knows
that a part is innocent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from quire.engine.replicas.parts import Part
from quire.engine.replicas.replica import Replica

ALONE_FROM: Final = 2
MOST_DEATHS: Final = 3
PASSED_TOKENS: Final = 16
MOST_DOUBLINGS: Final = 16


class Suspects:
    """The parts that go on alone, and the engine in which they do: one at a time."""

    def __init__(self) -> None:
        self._waiting: deque[Part] = deque()
        self.engine: Replica | None = None  # it takes nothing else
        self.on_trial: Part | None = None
        self._goal = 0

    @property
    def waiting(self) -> list[Part]:
        """The parts that wait for their trial."""
        return list(self._waiting)

    def note_death(self, parts: Sequence[Part]) -> tuple[list[Part], list[Part], Part | None]:
        """The engine of some parts has died: return the two halves that go on at once, and the part at fault. Mutates.

        All others wait for their trial. Of several samples each is a part from now on.
        """
        is_alone = len(parts) == 1 and parts[0] is self.on_trial
        for part in parts:
            part.num_deaths += 1
        if self.on_trial in parts:
            self.on_trial = self.engine = None
        if is_alone and parts[0].num_deaths >= MOST_DEATHS:
            return [], [], parts[0]
        pieces = [piece for part in parts for piece in part.pieces()]
        once = [piece for piece in pieces if piece.num_deaths < ALONE_FROM]
        self._waiting.extend(piece for piece in pieces if piece.num_deaths >= ALONE_FROM)
        half = (len(once) + 1) // 2
        return once[:half], once[half:], None

    def begin(self, part: Part, engine: Replica) -> None:
        """A part that waits goes on alone, in an engine that has nothing else. Mutates."""
        self._waiting.remove(part)
        self.engine, self.on_trial = engine, part
        self._goal = part.progress + (PASSED_TOKENS << min(part.num_deaths - ALONE_FROM, MOST_DOUBLINGS))

    def has_passed(self, part: Part) -> bool:
        """Whether the part on trial is past the place at which its engine died, or over. Does not mutate."""
        return part is self.on_trial and (part.is_over or part.progress >= self._goal)

    def end_trial(self) -> None:
        """The part on trial has passed, or leaves its engine for another reason than a death. Mutates."""
        self.on_trial = None

    def forget(self, part: Part) -> None:
        """A part has ended. Mutates."""
        if part in self._waiting:
            self._waiting.remove(part)
        if part is self.on_trial:
            self.on_trial = None
