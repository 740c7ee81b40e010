"""Log-probabilities in the three forms that clients read: OpenAI's old lists, its new objects, and vLLM's.

All are the model's own, before temperature, penalties and filters. JSON has neither NaN nor infinity, so the lowest
value is -9999. For each place the engine returns the token itself first, then the likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final, TypeVar, cast

from msgspec import Raw, json

from quire.engine.outputs import Logprob
from quire.engine.text.detokenizer import IncrementalDetokenizer
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.schemas.common import ContentLogprob, PromptLogprob, PromptLogprobs, TokenLogprob
from quire.serve.schemas.completions import CompletionLogprobs

Value = TypeVar("Value")

LEAST: Final = -9999.0

Entry = Mapping[int, Logprob]
"""One token and the likeliest tokens at its place, by token id."""


class TokenNames:
    """Writes tokens: as their text, or as "token_id:7" if ids were requested or there is no tokenizer."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def name(self, token_id: int, entry: Logprob) -> str:
        """Return the name of a token. Does not mutate."""
        return f"token_id:{token_id}" if self._as_ids else entry.decoded_token

    def name_of(self, token_id: int) -> str:
        """Return the name of a token, given only its id. Does not mutate."""
        if self._as_ids or self.tokenizer is None:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id)

    def bytes_of(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token, possibly a part of a character. Does not mutate."""
        return None if self.tokenizer is None else list(self.tokenizer.token_bytes(token_id))


class TextOffsets:
    """Finds where in a text each token begins, in characters. Mutable; use one per text."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        start: int = 0,
    ) -> None:
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens
            )
        self._offset = start

    def take(self, token_id: int) -> int:
        """Return where a token begins: at the end of the previous one. Mutates."""
        offset = self._offset
        if self._detokenizer is not None:
            self._offset += len(self._detokenizer.append([token_id]))
        return offset


def written(values: Iterable[Value]) -> list[Value]:
    """Return values as JSON already, each for itself: thousands of objects would be alive together otherwise.

    >>> json.encode(written([[7], None]))
    b'[[7],null]'
    """
    return [value if value is None else cast("Value", Raw(json.encode(value))) for value in values]


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Iterable[Entry | None],
    offsets: Sequence[int],
    num_top: int,
    names: TokenNames,
) -> CompletionLogprobs:
    """Return the old form: parallel lists. The entry of the very first token is None. Does not mutate."""
    found = CompletionLogprobs(text_offset=list(offsets), token_logprobs=[], tokens=[], top_logprobs=[])
    for token_id, entry in zip(token_ids, entries, strict=True):
        found.token_logprobs.append(None if entry is None else told(entry[token_id].logprob))
        found.tokens.append(names.name_of(token_id) if entry is None else names.name(token_id, entry[token_id]))
        found.top_logprobs.extend(written([None if entry is None else _by_name(entry, num_top, names)]))
    return found


def content_logprobs(entries: Iterable[Entry], num_top: int, names: TokenNames) -> Iterator[ContentLogprob]:
    """Yield the new form: an object for each token, with the `num_top` likeliest tokens. Does not mutate."""
    for entry in entries:
        top = [
            TokenLogprob(names.name(token_id, each), told(each.logprob), names.bytes_of(token_id))
            for token_id, each in likeliest(entry, num_top)
        ]
        token_id, itself = next(iter(entry.items()))
        yield ContentLogprob(names.name(token_id, itself), told(itself.logprob), names.bytes_of(token_id), top)


def prompt_logprobs(entries: Iterable[Entry | None], num_top: int) -> PromptLogprobs:
    """Return vLLM's form: each token of a prompt with the `num_top` likeliest, by id. Does not mutate."""
    return written(
        None
        if entry is None
        else {
            str(token_id): PromptLogprob(told(each.logprob), each.rank, each.decoded_token)
            for token_id, each in _itself_and_likeliest(entry, num_top).items()
        }
        for entry in entries
    )


def told(value: float) -> float:
    """Return a log-probability that JSON can represent.

    >>> told(-0.5), told(float("-inf")), told(float("nan"))
    (-0.5, -9999.0, -9999.0)
    """
    return max(LEAST, value)  # in this order, NaN becomes LEAST


def likeliest(entry: Entry, num_top: int) -> list[tuple[int, Logprob]]:
    """Return the likeliest tokens at a place, best first. Does not mutate."""
    return sorted(entry.items(), key=lambda item: item[1].rank)[:num_top]


def _itself_and_likeliest(entry: Entry, num_top: int) -> dict[int, Logprob]:
    return {**dict(islice(entry.items(), 1)), **dict(likeliest(entry, num_top))}


def _by_name(entry: Entry, num_top: int, names: TokenNames) -> dict[str, float]:
    """Return log-probabilities by name; of two tokens with one name, the first wins: the token itself comes first."""
    found: dict[str, float] = {}
    for token_id, each in _itself_and_likeliest(entry, num_top).items():
        found.setdefault(names.name(token_id, each), told(each.logprob))
    return found
