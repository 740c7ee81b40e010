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
text beyond that of the previous window is new. Text that ends with U+FFFD can be an incomplete character, so it waits,
at most until the window has `_MAX_WAITING` new tokens: then all is shown but the last three tokens, the most that an
incomplete character has. So each token costs O(1), and U+FFFD that a model writes itself is shown a few tokens late.

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
_MAX_INCOMPLETE: Final = _NUM_PROMPT_TOKENS - 1  # a token has at least one byte
_MAX_WAITING: Final = 8


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
    """Decodes a window of tokens again; the new piece is the text that was not in the previous window.

    A piece that ends with U+FFFD waits for the next tokens, but of `_MAX_WAITING` tokens only the last ones wait on. If
    the decoder changes the text before them afterwards, as that of SentencePiece does at invalid UTF-8 (see above), the
    change is not shown.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(prompt_token_ids)
        self._num_shown = len(self._window)

    def append(self, token_id: int) -> str:
        self._window.append(token_id)
        before, text = self._decoded(self._num_shown), self._decoded(len(self._window))
        if text[len(before) :] and not text.endswith(REPLACEMENT):
            return self._show(len(self._window), len(before))
        if len(self._window) - self._num_shown < _MAX_WAITING:
            return ""
        ends = range(len(self._window) - _MAX_INCOMPLETE, self._num_shown, -1)
        complete = (end for end in ends if text.startswith(self._decoded(end)))  # otherwise, it cuts a character
        return self._show(next(complete, ends[0]), len(before))

    def finish(self) -> str:
        before = self._decoded(self._num_shown)
        self._num_shown = len(self._window)
        return self._decoded(self._num_shown)[len(before) :]

    def _show(self, end: int, num_characters: int) -> str:
        """Return the text of the window up to a token, without its first characters; then the window moves."""
        text = self._decoded(end)[num_characters:]
        self._window, self._num_shown = self._window[self._num_shown :], end - self._num_shown
        return text

    def _decoded(self, end: int) -> str:
        return self._tokenizer.decode(self._window[:end], skip_special_tokens=False)


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
