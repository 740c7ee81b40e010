"""Proposers for tests: they know how texts go on, and are wrong when told to."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from quire import LLM
from quire.compute.speculation.base import Wanted
from quire.core.guesses import Guesses
from quire.core.step import RowStart


class Guesser:
    """Guesses how known texts go on, by their prompts; of every `wrong_each` tokens it has one wrong, 0: none.

    No prompt may be the beginning of another.
    """

    def __init__(
        self,
        texts: Mapping[tuple[int, ...], Sequence[int]],
        *,
        wrong_each: int = 0,
        wrong: Callable[[int], int] = lambda token: token ^ 1,
        most: int = 3,
    ) -> None:
        self._texts = texts
        self._wrong_each = wrong_each
        self._wrong = wrong
        self._most = most
        self.num_guesses = 0

    def begin(self, start: RowStart) -> None:
        """Nothing to do."""

    def release(self, row: int, tokens: array[int]) -> None:
        """Nothing to do."""

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return the next tokens of each row."""
        found = {}
        for row, (tokens, most, _) in rows.items():
            prompt = next(each for each in self._texts if tokens[: len(each)].tolist() == list(each))
            done = len(tokens) - len(prompt)
            guesses = list(self._texts[prompt][done : done + min(most, self._most)])
            for place in range(len(guesses)):
                if self._wrong_each and (done + place) % self._wrong_each == 0:
                    guesses[place] = self._wrong(guesses[place])
            self.num_guesses += len(guesses)
            found[row] = array("i", guesses)
        return {row: Guesses("ngram", guesses) for row, guesses in found.items() if guesses}


def verify_all_guesses(llm: LLM) -> None:
    """Have an engine verify every guess, whatever steps take on this machine. Mutates."""
    budget = llm.engine.scheduler.drafts
    for note in ("note_step", "note_plain", "note_search"):
        setattr(budget, note, lambda *step, **how: None)
