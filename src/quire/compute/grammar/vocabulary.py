"""Vocabulary: the tokens of a model, as bytes in a trie. Made once, when the first grammar asks for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

NO_END = "none: this model has no token that ends a text, so no text could be held to one"


class Vocabulary:
    """The tokens of one model, for whatever compiles grammars over them.

    `read` returns the text of its tokenizer.json; it is called once at most, as it may take a second.
    """

    def __init__(self, read: Callable[[], str], *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._read = read
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids

    @property
    def num_words(self) -> int:
        """The 32-bit words of a mask over all ids."""
        return -(-self.vocab_size // 32)

    def build(self) -> LLTokenizer:
        """Return the trie; raises `InvalidRequestError` where grammars cannot be had with this tokenizer.

        Takes about a second for 150,000 tokens. Does not mutate.
        """
        from llguidance import LLTokenizer

        if not self.eos_token_ids:
            raise InvalidRequestError("grammar", "a grammar", NO_END)
        try:
            return LLTokenizer(self._read(), n_vocab=self.vocab_size, eos_token=sorted(self.eos_token_ids))
        except (KeyboardInterrupt, SystemExit, MemoryError, InvalidRequestError):
            raise
        except BaseException as error:  # a panic of the library, which is no Exception, says the same
            reason = " ".join(str(error).split())
            raise InvalidRequestError("grammar", "a grammar", f"none with this model's tokenizer: {reason}") from error
