"""Token ids back to text, while they are being generated.

Text is bytes first. Nearly every language model decodes token by token to bytes, and the bytes are UTF-8: byte-level
BPE (GPT-2, Llama 3, Qwen) by an alphabet of 256 letters, SentencePiece (Llama 2, Mistral, Gemma) by "▁" for a space
and "<0xE4>" for a byte. So `TokenBytes` reads from the tokenizer's own decoder how a token becomes bytes, and an
incremental UTF-8 decoder turns bytes into text: a character goes out with its last byte, in O(1) per token, and the
pieces add up to the text of all tokens at once, however they are cut. Bytes that are no UTF-8 become U+FFFD by the rule
of the Unicode standard (one for each longest beginning of a character), which is what the `tokenizers` library does
too, but for one case: in a run of byte tokens that is not UTF-8 as a whole it replaces *every* byte, the good
characters before the bad byte too. No stream can do that, as they have been shown; here only the bad bytes are
replaced.

A decoder of another kind (WordPiece, a CTC collapse, none) is asked again for a short window of tokens, and what it
adds to the window before is the new text.

Rejected: `tokenizers.decoders.DecodeStream`. It has no way to end a stream, so what it holds back is lost, and a model
that writes U+FFFD itself makes its window grow forever.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Final, Protocol

from quire.core.errors import InvariantError

if TYPE_CHECKING:
    import tokenizers

    from quire.engine.tokenizer import Tokenizer

SPACE_MARK: Final = "▁"
REPLACEMENT: Final = "\ufffd"
_NUM_PROMPT_TOKENS: Final = 4  # as many as a character has bytes


class TokenBytes:
    """What bytes each token stands for, as the decoder in tokenizer.json says. Safe to share between threads."""

    def __init__(self, library: tokenizers.Tokenizer, steps: Sequence[Mapping[str, object]]) -> None:
        kinds = {step["type"] for step in steps}
        self._library = library
        self._steps = steps
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else {}
        self._known: dict[int, bytes] = {}
        self._drops_first_marks = any(
            step["type"] == "Metaspace" and step.get("prepend_scheme") != "never" for step in steps
        )
        self._drops_first_space = "Strip" in kinds

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> TokenBytes | None:
        """Return the bytes of the tokens of a tokenizer; None where its decoder does not work token by token."""
        settings = library.decoder and json.loads(library.decoder.__getstate__())
        steps = _flat_steps(settings) if settings else []
        return cls(library, steps) if steps and _is_bytewise(steps) else None

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text; none for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            token = self._library.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._decode(token)
        return known

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text: the space that encoding had put before it is gone."""
        if not self._drops_first_marks:
            return self[token_id]
        return self._decode((self._library.id_to_token(token_id) or "").replace(SPACE_MARK, ""))

    def trim(self, text: str) -> str:
        """Return a text, or the beginning of one, without the space that encoding had put before it."""
        return text[1:] if self._drops_first_space and text.startswith(" ") else text

    def _decode(self, token: str) -> bytes:
        if self._byte_of:
            # One letter outside of the alphabet, and the token is text that was added as it stands.
            found = [self._byte_of.get(letter) for letter in token]
            return token.encode() if None in found else bytes(byte for byte in found if byte is not None)
        for step in self._steps:
            if step["type"] == "ByteFallback" and (byte := _fallback_byte(token)) is not None:
                return byte
            if step["type"] == "Metaspace":
                token = token.replace(SPACE_MARK, " ")
            elif step["type"] == "Replace":
                token = token.replace(_pattern(step), str(step["content"]))
        return token.encode()


def _flat_steps(settings: Mapping[str, object]) -> list[Mapping[str, object]]:
    if settings.get("type") != "Sequence":
        return [settings]
    inner = settings.get("decoders")
    return [flat for step in inner for flat in _flat_steps(step)] if isinstance(inner, list) else []


def _is_bytewise(steps: Sequence[Mapping[str, object]]) -> bool:
    """Return whether tokens decode one by one, but for the very beginning of a text."""
    kinds = [str(step["type"]) for step in steps]
    if "ByteLevel" in kinds:
        return kinds == ["ByteLevel"]
    for position, step in enumerate(steps):
        kind = kinds[position]
        if kind == "Strip":
            usual = (step.get("content"), step.get("start"), step.get("stop")) == (" ", 1, 0)
            if not usual or "Fuse" not in kinds[:position] or position != len(kinds) - 1:
                return False
        elif kind == "Replace":
            if len(_pattern(step)) != 1:
                return False
        elif kind == "Metaspace":
            if step.get("replacement") != SPACE_MARK:
                return False
        elif kind not in {"ByteFallback", "Fuse"}:
            return False
    return True


def _pattern(step: Mapping[str, object]) -> str:
    """Return the text that a step replaces; "" for a regular expression."""
    pattern = step.get("pattern")
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return the letters of GPT-2 that stand for bytes: the printable ones for themselves, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class _Stream(Protocol):
    """Turns the tokens of a text into pieces of it; special tokens that are not shown do not come here."""

    def append(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteStream:
    """Decodes bytes as they come."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._first_token = True
        self._first_text = True

    def continue_after(self, prompt_token_ids: Sequence[int]) -> None:
        """Take up after the end of a prompt, in the middle of a character if need be. Mutates the stream."""
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
    """Decodes a window of tokens again; new is what the window has more than the part of it that was shown."""

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

    All pieces together are the text of the output as it follows the prompt. Only whole characters go out; a character
    that the last token left incomplete comes out of `finish` as U+FFFD.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        shown_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Begin a text behind a prompt; `shown_token_ids` are those special tokens that are not skipped."""
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
        """Add tokens; return the text that they completed. Mutates the sequence."""
        if self._finished:
            raise InvariantError("tokens after the end of a text")
        return "".join([self._stream.append(token_id) for token_id in token_ids if self._is_visible(token_id)])

    def finish(self) -> str:
        """Return what is left of the text: there will be no more tokens. Mutates the sequence."""
        self._finished = True
        return self._stream.finish()

    def _is_visible(self, token_id: int) -> bool:
        # A model may have more ids than its tokenizer; those have no text, and do not begin one.
        return token_id not in self._skipped and self._tokenizer.has(token_id)

    def _last_visible(self, token_ids: Sequence[int]) -> list[int]:
        last = list(islice(filter(self._is_visible, reversed(token_ids)), _NUM_PROMPT_TOKENS))
        return last[::-1]
