"""SuffixProposer: guesses that a text continues like an earlier answer with the same last tokens.

Programs request the same kind of answer again and again: records with the same keys, the same greeting, yesterday's
list. So the last four tokens are looked up in earlier answers.

    earlier answers:  … "city": "Ulm", "zip": … │ … "city": "Bonn", "zip": …
    this text:        … "city": "Kiel" ──────────────────────────────┘ , "zip": is the guess

Each scope has its own answers: the speed of a text could otherwise reveal to a tenant the answers of others. A scope
keeps its last `MOST_TOKENS` tokens, and only the most recently used scopes are kept.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from typing import Final, NamedTuple

from quire.compute.speculation.base import Wanted
from quire.compute.speculation.ngram import GramTable
from quire.core.guesses import Guesses
from quire.core.request import CacheScope
from quire.core.step import RowStart

LENGTH: Final = 4
MOST_TOKENS: Final = 1 << 16
"""For each scope: 256 KiB of tokens, and a table of up to 2 MiB."""
MOST_SCOPES: Final = 16
END: Final = -1
"""Separates two answers: not a token, so no match crosses it, and a guess ends at it."""


class Answers:
    """The concatenated answers of a scope.

    >>> answers = Answers()
    >>> answers.add(array("i", [1, 2, 3, 4, 5, 6]))
    >>> answers.after(array("i", [9, 1, 2, 3, 4]), 5)
    array('i', [5, 6])
    """

    def __init__(self) -> None:
        self._tokens = array("i")
        self._table = GramTable(LENGTH)

    def add(self, answer: array[int]) -> None:
        """Keep an answer; forget the older half if there are too many tokens. Mutates."""
        self._tokens += answer[-MOST_TOKENS // 2 :]
        self._tokens.append(END)
        if len(self._tokens) > MOST_TOKENS:
            self._tokens = self._tokens[-MOST_TOKENS // 2 :]
            self._table = GramTable(LENGTH)
        self._table.enter(self._tokens, len(self._tokens))

    def after(self, text: array[int], most: int) -> array[int]:
        """Return how the latest answer with the last tokens of a text continued. Does not mutate."""
        place = self._table.place_of(text, self._tokens)
        if place < 0:
            return array("i")
        found = self._tokens[place : place + most]
        return found[: found.index(END)] if END in found else found


class _Row(NamedTuple):
    scope: CacheScope
    num_prompt_tokens: int


class SuffixProposer:
    """Guesses by the earlier answers of rows in the same scope."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._scopes: OrderedDict[CacheScope, Answers] = OrderedDict()

    def begin(self, start: RowStart) -> None:
        """Note that a row begins a text. Mutates."""
        self._rows[start.row] = _Row(start.scope, start.num_prompt_tokens)

    def release(self, row: int, tokens: array[int]) -> None:
        """Keep the answer of a row; a preempted one may continue later. Mutates."""
        found = self._rows.pop(row, None)
        if found is None or len(tokens) - found.num_prompt_tokens <= LENGTH:
            return
        self._scopes.setdefault(found.scope, Answers()).add(tokens[found.num_prompt_tokens :])
        self._scopes.move_to_end(found.scope)
        if len(self._scopes) > MOST_SCOPES:
            self._scopes.popitem(last=False)

    def propose(self, rows: Mapping[int, Wanted]) -> dict[int, Guesses]:
        """Return the tokens after the rows' last tokens in earlier answers. Does not mutate."""
        found: dict[int, Guesses] = {}
        for row, (tokens, most, _) in rows.items():
            answers = self._scopes.get(self._rows[row].scope)
            guesses = array("i") if answers is None else answers.after(tokens, most)
            if guesses:
                found[row] = Guesses("suffix", guesses)
        return found
