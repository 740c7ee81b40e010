"""Vocabulary: the tokens of a model, as bytes in a trie. Made once, when the first grammar needs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NO_END: Final = "none: this model has no token that ends a text, which grammars need"


class Vocabulary:
    """The tokens of one model, for compiling grammars.

    `read` returns the content of its tokenizer.json, which may take a second.
    """

    def __init__(
        self, read: Callable[[], Mapping[str, Any]], *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self.read = read
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    @property
    def num_words(self) -> int:
        """The 32-bit words of a mask over all ids."""
        return -(-self.vocab_size // 32)

    def ends(self) -> Sequence[int]:
        """Return the tokens that end a text; raises `InvalidRequestError` if there is none."""
        if not self.eos_token_ids:
            raise InvalidRequestError("grammar", "a grammar", NO_END)
        return sorted(self.eos_token_ids)

    def special_tokens(self) -> dict[int, str]:
        """Return the tokens that are not text, by id: those marked so, and all in angle brackets. Reads the file."""
        return {
            token["id"]: token["content"]
            for token in self.read()["added_tokens"]
            if token["special"] or (token["content"].startswith("<") and token["content"].endswith(">"))
        }

    def build(self) -> LLTokenizer:
        """Return the trie; raises `InvalidRequestError` if grammars cannot work with this tokenizer.

        Takes a second or two for 150,000 tokens, and 130 MB. Does not mutate.
        """
        from llguidance import LLTokenizer

        ends = list(self.ends())
        try:
            return LLTokenizer(json.dumps(self.read()), n_vocab=self.vocab_size, eos_token=ends)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # also a panic of the library, which is not an Exception
            reason = " ".join(str(error).split())
            raise InvalidRequestError("grammar", "a grammar", f"none with this model's tokenizer: {reason}") from error
