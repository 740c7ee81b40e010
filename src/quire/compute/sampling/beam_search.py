"""BeamSearch: the width likeliest continuations of a prompt, by the sums of their log-probabilities.

    running   width texts that continue, best first; each step extends them all and keeps the best extensions
    finished  at most width texts that have ended, by score: sum of log-probabilities / length ^ length_penalty

One step compares the extensions of all running texts. Those that end (with an end token, or at the maximum length)
finish if they are among the best `width`; the best `width` of the others continue. There are always enough, because
each text has at least (number of end tokens + 1) × `width` candidates.

The search is over when no text can continue, or when no running text can beat the finished ones. The bound is the score
of the best running text at its present length; with `early_stopping` "never" and a positive penalty, at the maximum
length. `early_stopping` True ends the search as soon as `width` texts have finished. These are the rules of
transformers, and texts and scores are the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

from quire.core.hypothesis import Hypothesis


@dataclass(frozen=True, slots=True)
class SearchRules:
    """The settings of a search. Lengths count generated tokens; no end token counts before `min_length`."""

    width: int
    max_length: int
    eos_token_ids: frozenset[int] = frozenset()
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_length: int = 0

    @property
    def num_candidates(self) -> int:
        """The number of extensions of each running text that a step needs, or all if there are fewer."""
        num_ends = len(self.eos_token_ids)
        return self.width * (1 + max(1, num_ends)) + (num_ends if self.min_length else 0)


class Extension(NamedTuple):
    """The next token of a running text: the index of that text, and the token."""

    parent: int
    token: int


class RunningText(NamedTuple):
    """A text that continues: its generated tokens, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    total: float


Candidates = Iterable[tuple[int, float]]
"""The likeliest next tokens of one running text, best first, with their log-probabilities."""


class BeamSearch:
    """One search.

    >>> search = BeamSearch(SearchRules(width=2, max_length=2))
    >>> search.advance([[(7, -0.5), (8, -1.0), (9, -2.0)]])
    [Extension(parent=0, token=7), Extension(parent=0, token=8)]
    >>> search.advance([[(1, -2.0), (2, -3.0)], [(1, -0.1), (2, -4.0)]]), search.is_over
    ([], True)
    >>> [(each.token_ids, round(each.score, 2)) for each in search.finished]
    [((8, 1), -0.55), ((7, 1), -1.25)]
    """

    def __init__(self, rules: SearchRules) -> None:
        self.rules = rules
        self.finished: list[Hypothesis] = []  # best first
        self.is_over = False
        self._running = [RunningText((), 0.0)]

    def advance(self, candidates: Sequence[Candidates]) -> list[Extension]:
        """Take the candidates of every running text, in order; return the texts that continue, best first. Mutates.

        Returns none if that ends the search: `finished` has its texts.
        """
        width = self.rules.width
        best = self._best_extensions(candidates)
        ends = [self._ends(extension) for extension, _ in best]
        self._finish([found for found, end in zip(best[:width], ends, strict=False) if end])
        going_on = [found for found, end in zip(best, ends, strict=True) if not end][:width]
        self._running = [self._extended(*found) for found in going_on]
        self.is_over = not going_on or not self._is_worth_going_on()
        return [] if self.is_over else [extension for extension, _ in going_on]

    def _best_extensions(self, candidates: Sequence[Candidates]) -> list[tuple[Extension, float]]:
        """Return the best of all extensions, best first, without a look at others of a text. Does not mutate."""
        texts = [self._extensions(parent, tokens) for parent, tokens in enumerate(candidates)]
        best_first = heapq.merge(*texts, key=lambda each: (-each[1], each[0]))
        return list(islice(best_first, self.rules.num_candidates))

    def _extensions(self, parent: int, tokens: Candidates) -> Iterator[tuple[Extension, float]]:
        text = self._running[parent]
        banned = () if len(text.token_ids) >= self.rules.min_length else self.rules.eos_token_ids
        for token, logprob in tokens:
            if token not in banned:
                yield Extension(parent, token), text.total + logprob

    def _ends(self, extension: Extension) -> bool:
        length = len(self._running[extension.parent].token_ids) + 1
        return extension.token in self.rules.eos_token_ids or length >= self.rules.max_length

    def _extended(self, extension: Extension, total: float) -> RunningText:
        return RunningText((*self._running[extension.parent].token_ids, extension.token), total)

    def _finish(self, ended: Sequence[tuple[Extension, float]]) -> None:
        for found in ended:
            text = self._extended(*found)
            score = text.total / len(text.token_ids) ** self.rules.length_penalty
            self.finished.append(Hypothesis(text.token_ids, text.total, score))
        self.finished.sort(key=lambda each: -each.score)
        del self.finished[self.rules.width :]

    @property
    def _is_full(self) -> bool:
        return len(self.finished) == self.rules.width

    def _is_worth_going_on(self) -> bool:
        """Whether a running text may still join the finished ones. Does not mutate."""
        rules = self.rules
        if self._is_full and rules.early_stopping is True:
            return False
        best = self._running[0]
        to_the_end = rules.early_stopping == "never" and rules.length_penalty > 0.0
        length = rules.max_length if to_the_end else len(best.token_ids)
        worst = self.finished[-1].score if self._is_full else -math.inf
        hope: float = best.total / length**rules.length_penalty
        return hope > worst
