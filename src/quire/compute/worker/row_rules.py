"""RowRules: the rules that change the logits of one row, as its text grows. Rows without rules have none.

    known tokens ──► TokenCounts ──► seen, counts      penalties
                 └─► BadWords    ──► banned            the last token of a bad word whose others were just written
    allowed, biases                                    the same at every position

Everything depends only on the tokens before the draw, never on the steps that made them: `at` gets the text and
catches up with it. So rules hold after a preemption, in a branch that inherits its prompt, and after drafts: each draw
sees the drafts before it. While the last token of a text is `UNKNOWN`, its draws have no counts: the runner, which has
the token, continues with its own counts (`step_ahead`).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from quire.compute.arrays import FloatArray, IntArray
from quire.compute.worker.model_runner import UNKNOWN
from quire.core.step import RowStart


class DrawRules(NamedTuple):
    """The rules of one draw; see `TokenRules`."""

    allowed: IntArray
    banned: IntArray
    biased: IntArray
    biases: FloatArray
    seen: IntArray
    counts: IntArray


NO_IDS = np.zeros(0, np.int64)
NO_RULES = DrawRules(NO_IDS, NO_IDS, NO_IDS, np.zeros(0, np.float32), NO_IDS, NO_IDS)


class RowRules:
    """The rules of one row."""

    def __init__(self, start: RowStart, eos_token_ids: frozenset[int]) -> None:
        sampling = start.sampling
        self._allowed = _distinct(sampling.allowed_token_ids or ())
        self._biased = np.array([token for token, _ in sampling.biases], np.int64)
        self._biases = np.array([bias for _, bias in sampling.biases], np.float32)
        self._bad_words = BadWords(sampling.bad_words_ids)
        self._counts: TokenCounts | None = None
        if sampling.has_penalties:
            with_prompt, window = sampling.repetition_penalty != 1, sampling.penalty_window
            self._counts = TokenCounts(start.num_prompt_tokens, with_prompt=with_prompt, window=window)
        self._min_length = start.num_prompt_tokens + sampling.min_tokens
        self._ends = sampling.ending_tokens(eos_token_ids) if sampling.min_tokens else frozenset[int]()

    def at(self, text: array[int], drafts: Sequence[int] = ()) -> list[DrawRules]:
        """Return the rules of the draw after a row's known tokens, and after each of the drafts. Mutates.

        O(new tokens), in addition to the size of the result.
        """
        counts = None if text[-1] == UNKNOWN else self._counts
        if counts is not None:
            counts.follow(text)
            counts = counts.copy() if drafts else counts
        found = [self._rules(text, counts)]
        if drafts:
            text = text[:]
        for draft in drafts:
            text.append(draft)
            if counts is not None:
                counts.follow(text)
            found.append(self._rules(text, counts))
        return found

    def _rules(self, text: array[int], counts: TokenCounts | None) -> DrawRules:
        banned = self._bad_words.banned_after(text)
        if len(text) < self._min_length:
            banned |= self._ends
        seen, numbers = (NO_IDS, NO_IDS) if counts is None else counts.columns()
        return DrawRules(self._allowed, _distinct(banned), self._biased, self._biases, seen, numbers)


class BadWords:
    """Sequences of tokens that must not be generated.

    >>> BadWords([(5,), (1, 2), (9, 1, 3)]).banned_after(array("i", [9, 1]))
    {2, 3, 5}
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._always = {word[0] for word in words if len(word) == 1}
        self._after: dict[int, list[tuple[array[int], int]]] = {}  # by the second last token
        for word in words:
            if len(word) > 1:
                self._after.setdefault(word[-2], []).append((array("i", word[:-1]), word[-1]))

    def banned_after(self, text: array[int]) -> set[int]:
        """Return the tokens that would end a bad word. Does not mutate."""
        banned = set(self._always)
        for beginning, last in self._after.get(text[-1], ()):
            if text[-len(beginning) :] == beginning:
                banned.add(last)
        return banned


class TokenCounts:
    """The distinct tokens of a text, and how often each occurs in the output; without the prompt: of the output only.

    With a `window`: the tokens among that many of the last, in prompt or output, and how often each occurs there.

    >>> counts = TokenCounts(2, with_prompt=True)
    >>> counts.follow(array("i", [7, 8, 9, 7, 9]))
    >>> [column.tolist() for column in counts.columns()]
    [[7, 8, 9], [1, 0, 2]]
    >>> counts = TokenCounts(2, with_prompt=True, window=4)
    >>> counts.follow(array("i", [7, 8, 9, 9, 6]))
    >>> [column.tolist() for column in counts.columns()]
    [[8, 9, 6], [1, 2, 1]]
    """

    def __init__(self, num_prompt_tokens: int, *, with_prompt: bool, window: int = 0) -> None:
        self._num_prompt_tokens = 0 if window else num_prompt_tokens
        self._window = window
        self._num_counted = 0 if with_prompt else self._num_prompt_tokens
        self._places: dict[int, int] = {}
        self._ids = np.zeros(16, np.int64)  # in the order of their first occurrence
        self._counts = np.zeros(16, np.int64)

    def follow(self, text: array[int]) -> None:
        """Count the tokens added to the text since the last call. Mutates; O(new tokens)."""
        begin = 0  # of the window
        if self._window:
            begin = max(0, len(text) - self._window)
            for token in text[max(0, self._num_counted - self._window) : min(begin, self._num_counted)]:
                self._counts[self._places[token]] -= 1
        for token in text[self._num_counted : self._num_prompt_tokens]:
            self._place(token)
        for token in text[max(self._num_counted, self._num_prompt_tokens, begin) :]:
            place = self._place(token)  # may move the columns
            self._counts[place] += 1
        self._num_counted = len(text)

    def columns(self) -> tuple[IntArray, IntArray]:
        """Return the tokens, and how often each occurs in the output, or in the window. Does not mutate."""
        ids, counts = self._ids[: len(self._places)], self._counts[: len(self._places)]
        if self._window:
            return ids[counts > 0], counts[counts > 0]
        return ids.copy(), counts.copy()

    def copy(self) -> TokenCounts:
        """Return an independent copy. Does not mutate."""
        other = TokenCounts(self._num_prompt_tokens, with_prompt=True, window=self._window)
        other._num_counted, other._places = self._num_counted, self._places.copy()
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        return other

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.pad(self._ids, (0, place))
            self._counts = np.pad(self._counts, (0, place))
        self._ids[place] = token
        return place


def _distinct(ids: Iterable[int]) -> IntArray:
    return np.array(sorted(set(ids)), np.int64)
