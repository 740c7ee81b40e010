"""LogprobList: log-probabilities in the caller's form, each created when it is read, and not kept.

With the 20 likeliest tokens, an entry is 20 objects and takes ten times the memory of its arrays. A call can have
hundreds of thousands of entries, and encoding an answer needs them one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeVar, cast

from quire.core.logprobs import TokenLogprobs
from quire.engine.outputs import Logprob
from quire.engine.text.tokenizer import Tokenizer

Entry = TypeVar("Entry", bound=dict[int, Logprob] | None)


class LogprobList(Sequence[Entry]):
    """For each token, the log-probabilities of itself and the likeliest tokens, by id; None if unknown. Immutable."""

    __slots__ = ("_entries", "_tokenizer", "_tokens")

    def __init__(
        self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], tokenizer: Tokenizer | None
    ) -> None:
        self._tokens = tokens
        self._entries = entries
        self._tokenizer = tokenizer

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return LogprobList[Entry](self._tokens[place], self._entries[place], self._tokenizer)
        return self._made(self._tokens[place], self._entries[place])

    def __iter__(self) -> Iterator[Entry]:
        return map(self._made, self._tokens, self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __hash__(self) -> int:
        return hash(tuple(self._tokens))

    def __repr__(self) -> str:
        return repr(list(self))

    def _made(self, token: int, entry: TokenLogprobs | None) -> Entry:
        return cast("Entry", None if entry is None else token_and_likeliest(token, entry, self._tokenizer))


class JoinedList(Sequence[Entry]):
    """The entries of several lists, one list after the other. Immutable."""

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Sequence[Entry]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, place: Any) -> Any:
        return list(self)[place]

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._parts)


def token_and_likeliest(token: int, entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """Return the log-probability of a token, then those of the likeliest ones, by token id. Does not mutate."""
    found = {token: (entry.logprob, entry.rank)}
    for rank, (other, value) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        found[other] = value, rank
    return {
        each: Logprob(value, rank, "" if tokenizer is None else tokenizer.token_text(each))
        for each, (value, rank) in found.items()
    }
