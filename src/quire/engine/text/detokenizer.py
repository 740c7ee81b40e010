"""Turns token ids back into text while they are generated.

For nearly every language model, each token stands for bytes of UTF-8: byte-level BPE (GPT-2, Llama 3, Qwen) has an
alphabet of 256 letters, SentencePiece (Llama 2, Mistral, Gemma) writes "▁" for a space and "<0xE4>" for a byte. So
`TokenBytes` reads from the tokenizer's own decoder how a token becomes bytes, and an incremental UTF-8 decoder turns
bytes into text: a character is emitted with its last byte, in O(1) per token, and the pieces add up to the text of all
tokens decoded at once, however they are cut. Invalid UTF-8 becomes U+FFFD by the rule of the Unicode standard (one for
each longest beginning of a character). The `tokenizers` library does the same, with one exception: if a run of byte
tokens is not valid UTF-8, it replaces *every* byte, including the characters before the invalid byte. No stream can do
that, because it has already emitted those; here only the invalid bytes are replaced.

With a decoder of another kind (WordPiece, a CTC collapse, none), a short window of tokens is decoded again, and the
text beyond that of the previous window is new.

Rejected: `tokenizers.decoders.DecodeStream`. It cannot end a stream, so text that it holds back is lost, and a model
that writes U+FFFD itself makes its window grow forever.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from quire.core.errors import InvariantError
from quire.engine.text.token_bytes import TokenBytes

if TYPE_CHECKING:
    from quire.engine.text.tokenizer import Tokenizer

REPLACEMENT: Final = "\ufffd"
_NUM_PROMPT_TOKENS: Final = 4  # the longest character has 4 bytes


class _Stream(Protocol):
    """Turns the visible tokens of a text into pieces of text."""

    def append(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteStream:
    """Decodes bytes as they arrive."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first_token = True
        self._first_text = True

    def continue_after(self, prompt_token_ids: Sequence[int]) -> None:
        """Continue at the end of a prompt, which can be within a character. Mutates the stream."""
        for token_id in prompt_token_ids:
            self._decoder.decode(self._bytes[token_id])
        if prompt_token_ids:
            self._first_token = self._first_text = False

    def append(self, token_id: int) -> str:
        data = self._bytes.first(token_id) if self._first_token else self._bytes[token_id]
        self._first_token = False
        return self._trimmed(self._decoder.decode(data))

    def finish(self) -> str:
        return self._trimmed(self._decoder.decode(b"", final=True))

    def _trimmed(self, text: str) -> str:
        if text and self._first_text:
            self._first_text = False
            return self._bytes.trim(text)
        return text


class _WindowStream:
    """Decodes a window of tokens again; the new piece is the text that was not in the previous window."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids)
        self._num_shown = len(self._window)

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._num_shown :]
        self._num_shown = len(self._window)
        return text

    def finish(self) -> str:
        text = self._new_text()
        self._num_shown = len(self._window)
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._window[: self._num_shown], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(before) :]


class IncrementalDetokenizer:
    """The text of one generated sequence, piece by piece. Mutable.

    All pieces together are the text of the output as a continuation of the prompt. Pieces have only complete
    characters; if the last token leaves a character incomplete, `finish` returns it as U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a text after a prompt; `shown_token_ids` are special tokens that are never skipped."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids - shown_token_ids if skip_special_tokens else frozenset()
        self._finished = False
        prompt = self._last_visible(prompt_token_ids)
        token_bytes = tokenizer.bytes_of_tokens
        self._stream: _Stream
        if token_bytes is None:
            self._stream = _WindowStream(tokenizer, prompt)
        else:
            self._stream = stream = _ByteStream(token_bytes)
            stream.continue_after(prompt)

    def append(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that they complete. Mutates the sequence."""
        if self._finished:
            raise InvariantError("tokens after the end of a text")
        return "".join([self._stream.append(token_id) for token_id in token_ids if self._is_visible(token_id)])

    def finish(self) -> str:
        """End the sequence; return the rest of its text. Mutates the sequence."""
        self._finished = True
        return self._stream.finish()

    def _is_visible(self, token_id: int) -> bool:
        # A model can have more ids than its tokenizer; they have no text, and none of them begins a text.
        return token_id not in self._skipped and self._tokenizer.has(token_id)

    def _last_visible(self, token_ids: Sequence[int]) -> list[int]:
        last = list(islice(filter(self._is_visible, reversed(token_ids)), _NUM_PROMPT_TOKENS))
        return last[::-1]
