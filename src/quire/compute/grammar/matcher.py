"""TextMatcher: the position of one text in its grammar, and the tokens that are allowed next.

    tokens of the text ──► advance ──► state ──► mask: a bit for each token

The state depends only on the tokens, so it is never saved: a new matcher can replay them.
All matchers of a grammar share its lexer, which makes states as texts reach them: a state that one row has reached is
free for the others. So all texts of a grammar together count towards the limit on states. Therefore a matcher that
fails retries with its own lexer before it reports the failure: whether a text can continue then depends only on that
text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llguidance import LLMatcher

MOST_BEGINNINGS: Final = 32
"""If more tokens than this are allowed, the grammar leaves a choice; their texts are not compared."""


class TextMatcher:
    """The position of one text in its grammar. Belongs to one thread.

    A mask is `num_bytes` bytes, a bit for each token. `renew` compiles the grammar again; `note_advance` gets the
    number of tokens that the text has advanced; `bytes_of` returns the text of a token, empty for a special token.
    Tokens that end a text do not advance it.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_bytes: int,
        *,
        renew: Callable[[], LLMatcher],
        note_advance: Callable[[int], None],
        bytes_of: Callable[[int], bytes],
    ) -> None:
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._note_advance = note_advance
        self._bytes_of = bytes_of
        self._renew: Callable[[], LLMatcher] | None = renew
        self._tokens: list[int] = []

    @property
    def failure(self) -> str:
        """The reason why the text cannot continue; empty while it can. A failed matcher stays failed."""
        return one_line(self._matcher.get_error()) if self._matcher.is_error() else ""

    def advance(self, tokens: Sequence[int]) -> None:
        """Advance by tokens of the text. Mutates; see `failure` for errors."""
        self._tokens += tokens
        self._note_advance(len(tokens))
        if not self._matcher.consume_tokens(list(tokens)):
            self._retry()

    def mask(self) -> bytes:
        """Return the mask of the tokens allowed next. Mutates; see `failure` for errors."""
        found = self._mask()
        if self._matcher.is_error() and self._retry():
            found = self._mask()
        return found

    def masks_behind(self, drafts: Sequence[int]) -> list[bytes]:
        """Return the masks of the tokens allowed after each draft. The text does not advance.

        Makes no mask after a draft that the grammar does not allow.
        """
        found: list[bytes] = []
        for draft in drafts:
            if self._matcher.is_stopped() or self._matcher.try_consume_tokens([draft]) != 1:
                break
            found.append(self._mask())
            if self._matcher.is_error():
                break
        if self._matcher.is_error():
            self._retry()
            return found[:-1]
        if found:
            self._matcher.rollback(len(found))
        return found

    def forced(self, after: Sequence[int], mask: bytes, most: int) -> tuple[list[int], list[bytes]]:
        """Return the tokens that the grammar forces, and the masks after them. The text does not advance.

        They follow the text and some drafts, whose last mask is `mask`. A token counts as forced if all other allowed
        tokens are its prefixes: `{"` if only `{` and `{"` are allowed. The model can choose the shorter ones, so these
        are guesses. Returns no tokens for a text with its own lexer: looking ahead could use up the states that the
        text needs itself.
        """
        found, masks = list[int](), list[bytes]()
        longest = -1 if self._renew is None else self._longest_of_one_way(mask)
        if longest < 0:
            return found, masks
        num_taken = self._matcher.try_consume_tokens(list(after)) if after else 0
        while longest >= 0 and num_taken == len(after) + len(found) and len(found) < most:
            if self._matcher.is_stopped() or self._matcher.try_consume_tokens([longest]) != 1:
                break
            num_taken += 1
            found.append(longest)
            masks.append(self._mask())
            longest = self._longest_of_one_way(masks[-1])
        if self._matcher.is_error():
            self._retry()
            return [], []
        if num_taken:
            self._matcher.rollback(num_taken)
        return found, masks

    def _longest_of_one_way(self, mask: bytes) -> int:
        """Return the longest of the tokens in a mask if all others are its prefixes, else -1."""
        bits = int.from_bytes(mask, "little")
        if not 0 < bits.bit_count() <= MOST_BEGINNINGS:
            return -1
        texts: dict[bytes, int] = {}
        while bits:
            token = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            texts[self._bytes_of(token)] = token
        longest = max(texts, key=len)
        return texts[longest] if all(longest.startswith(text) for text in texts) and b"" not in texts else -1

    def _mask(self) -> bytes:
        return self._matcher.compute_bitmask()[: self._num_bytes]

    def _retry(self) -> bool:
        """Replay the text with its own lexer, unless it has one; return whether that succeeded."""
        if self._renew is None:
            return False
        self._matcher, self._renew = self._renew(), None
        return bool(self._matcher.consume_tokens(self._tokens))


def one_line(message: str) -> str:
    """Return a message of llguidance as one line.

    >>> one_line("LexerTooComplex: too big <non-verbose/>")
    'LexerTooComplex: too big'
    """
    said, _, _ = message.partition("<backtrace>")
    said = said.replace("<non-verbose/>", "").replace("NoExtensionBias", "no token can follow")
    return " ".join(said.split())[:300]
