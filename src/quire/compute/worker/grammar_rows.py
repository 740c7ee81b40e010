"""GrammarRows: which tokens the texts of rows may go on with, where a grammar holds them.

    row starts ──► a matcher of its grammar           nothing is read yet
    draw       ──► the tokens since the last draw ──► its state ──► a mask; behind drafts, one for each of them

As with `RowRules`, everything is a function of the tokens that stand before the draw: a row that starts anew (after a
preemption, as a branch of `n`) replays its output, and nothing is saved, moved or forked. A text that has come to its
end is not followed further: with several steps under way one more draw is made behind it, which nobody reads.

A row whose matcher cannot go on has failed, and no other row has.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.compute.arrays import IntArray, MaskArray
from quire.compute.sampling.draws import NO_MASK, TokenMasks
from quire.core.errors import ExecutionError
from quire.core.grammar import CANNOT_HOLD
from quire.core.step import RowStart

if TYPE_CHECKING:
    from quire.compute.grammar import GrammarCompiler, TextMatcher

NO_COMPILER = "a grammar needs the tokens of the model, and this worker was made without them"


@dataclass(slots=True)
class GrammarRow:
    """One row that is held to a grammar, and how far its text has been followed."""

    matcher: TextMatcher
    num_followed: int
    has_ended: bool = False

    def follow(self, text: array[int], eos_token_ids: frozenset[int]) -> None:
        """Catch up with a text. Mutates; O(new tokens)."""
        new = text[self.num_followed :].tolist()
        self.num_followed = len(text)
        going_on = before_end(new, eos_token_ids)
        if going_on and not self.has_ended:
            self.matcher.advance(going_on)
        self.has_ended |= len(going_on) < len(new)


class GrammarRows:
    """The rows of a worker that are held to a grammar; `compiler` None: none can be."""

    def __init__(self, compiler: GrammarCompiler | None, eos_token_ids: frozenset[int]) -> None:
        self._compiler = compiler
        self._eos_token_ids = eos_token_ids
        self._rows: dict[int, GrammarRow] = {}

    def start(self, start: RowStart) -> None:
        """Enter the grammar of a request that takes a row, if it has one; raises where it cannot be. Mutates."""
        self.release(start.row)
        if start.sampling.grammar is None:
            return
        if self._compiler is None:
            raise ExecutionError(NO_COMPILER)
        matcher = self._compiler.matcher(start.sampling.grammar)
        self._rows[start.row] = GrammarRow(matcher, start.num_prompt_tokens)

    def release(self, row: int) -> None:
        """Forget the grammar of a row. Mutates."""
        self._rows.pop(row, None)

    def mask(self, texts: Mapping[int, array[int]], drafts: Mapping[int, Sequence[int]]) -> RowMasks:
        """Return what the rows that draw may draw, by their texts and drafts. Mutates what is known of texts."""
        held = [row for row in texts if row in self._rows]
        if self._compiler is None or not held:
            return NO_MASKS
        num_draws = [1 + len(drafts.get(row, ())) for row in held]
        words = np.zeros((sum(num_draws), self._compiler.vocabulary.num_words), np.uint32)
        places: dict[int, IntArray] = {}
        failures: dict[int, str] = {}
        first = 0
        for row, count in zip(held, num_draws, strict=True):
            masks = words[first : first + count]
            num_made = self._fill(self._rows[row], texts[row], drafts.get(row, ()), masks)
            if self._rows[row].matcher.failure:
                failures[row] = f"{CANNOT_HOLD}: {self._rows[row].matcher.failure}"
            at = np.arange(first, first + count)
            places[row] = np.where(at < first + num_made, at, NO_MASK)
            first += count
        return RowMasks(words, places, failures)

    def _fill(self, row: GrammarRow, text: array[int], drafts: Sequence[int], masks: MaskArray) -> int:
        """Write the masks of a row's draws; return how many of them, the first ones, were."""
        row.follow(text, self._eos_token_ids)
        if row.has_ended or row.matcher.failure:
            return 0
        row.matcher.fill(masks[0])
        going_on = before_end(drafts, self._eos_token_ids)
        if not going_on or row.matcher.failure:
            return 1
        return 1 + row.matcher.fill_behind(going_on, masks[1 : 1 + len(going_on)])


@dataclass(frozen=True, slots=True)
class RowMasks:
    """The masks of a step, where those of each row stand, and which rows cannot go on."""

    words: MaskArray  # [num_masks, num_words]
    places: Mapping[int, IntArray]  # by row: for its draw, and for those behind its drafts; NO_MASK: none
    failures: Mapping[int, str]

    def of_draws(self, rows: IntArray, num_draws: IntArray, drafted: IntArray) -> TokenMasks:
        """Return the masks of draws: an entry's draws stand behind its drafts, or are all made in one place."""
        if not self.places:
            return TokenMasks.none(int(num_draws.sum()))
        parts = [
            self.places[row] if row in self.places and along else np.full(count, self._first(row), np.int64)
            for row, count, along in zip(rows.tolist(), num_draws.tolist(), drafted.tolist(), strict=True)
        ]
        return TokenMasks(np.concatenate(parts), self.words)

    def _first(self, row: int) -> int:
        return int(self.places[row][0]) if row in self.places else NO_MASK


NO_MASKS = RowMasks(np.zeros((0, 0), np.uint32), {}, {})


def before_end(tokens: Sequence[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Return the tokens that stand before the first that ends a text. Does not mutate.

    >>> before_end([5, 6, 0, 7], frozenset([0]))
    [5, 6]
    """
    for index, token in enumerate(tokens):
        if token in eos_token_ids:
            return list(tokens[:index])
    return list(tokens)
