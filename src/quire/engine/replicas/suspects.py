"""Suspects: finds the request that kills engines, so that only this request ends.

An engine that dies does not report the cause: every part that it had is a suspect. This is what `Isolation` does with a
failed step, but each failed trial costs an engine.

    first death      the engine's parts continue in two halves, in different engines if possible
    second death     each of its parts continues alone, one after another, in an engine without other requests
    alone, at its third death     the part is at fault, and ends with an error; all others continue

A part on trial passes once it is some tokens past the place at which its engine died: 16, doubled with each further
death, so that a request that kills an engine only now and then is found too. Its count of deaths is never reset,
because a trial cannot prove a part innocent.
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
    """The parts that must be tried alone, one at a time, and the engine reserved for the trial."""

    def __init__(self) -> None:
        self._waiting: deque[Part] = deque()
        self.engine: Replica | None = None  # reserved for the trial
        self.on_trial: Part | None = None
        self._goal = 0

    @property
    def waiting(self) -> list[Part]:
        """The parts that wait for their trial."""
        return list(self._waiting)

    def note_death(self, parts: Sequence[Part]) -> tuple[list[Part], list[Part], Part | None]:
        """Count a death of an engine with these parts; return two halves to continue, and the part at fault. Mutates.

        All others wait for their trial. A request with several samples becomes one part per sample.
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
        """Begin the trial of a waiting part, in an engine without other requests. Mutates."""
        self._waiting.remove(part)
        self.engine, self.on_trial = engine, part
        self._goal = part.progress + (PASSED_TOKENS << min(part.num_deaths - ALONE_FROM, MOST_DOUBLINGS))

    def has_passed(self, part: Part) -> bool:
        """Whether this is the part on trial, and it has ended or is far enough past the last death. Does not mutate."""
        return part is self.on_trial and (part.is_over or part.progress >= self._goal)

    def end_trial(self) -> None:
        """End the trial, because the part has passed, or leaves its engine for another reason than a death. Mutates."""
        self.on_trial = None

    def forget(self, part: Part) -> None:
        """Remove a part that has ended. Mutates."""
        if part in self._waiting:
            self._waiting.remove(part)
        if part is self.on_trial:
            self.on_trial = None
