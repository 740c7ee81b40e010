"""TokenBytes: the bytes of each token, for tokenizers whose tokens decode to bytes independently of each other."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import tokenizers

SPACE_MARK: Final = "▁"


class TokenBytes:
    """The bytes of each token, by the decoder in tokenizer.json. Safe to share between threads."""

    def __init__(self, library: tokenizers.Tokenizer, parts: Sequence[Mapping[str, object]]) -> None:
        kinds = {part["type"] for part in parts}
        self._library = library
        self._parts = parts
        self._byte_of = _byte_level_alphabet() if "ByteLevel" in kinds else {}
        self._known: dict[int, bytes] = {}
        self._drops_first_marks = any(
            part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in parts
        )
        self._drops_first_space = "Strip" in kinds

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> TokenBytes | None:
        """Return the bytes of a tokenizer's tokens; None if its decoder does not work token by token."""
        settings = library.decoder and json.loads(library.decoder.__getstate__())
        parts = _flat_parts(settings) if settings else []
        return cls(library, parts) if parts and _is_bytewise(parts) else None

    def __getitem__(self, token_id: int) -> bytes:
        """Return the bytes of a token within a text; empty for an id that the tokenizer does not have."""
        known = self._known.get(token_id)
        if known is None:
            token = self._library.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._decode(token)
        return known

    def first(self, token_id: int) -> bytes:
        """Return the bytes of a token that begins a text, without the space that encoding adds before a text."""
        if not self._drops_first_marks:
            return self[token_id]
        return self._decode((self._library.id_to_token(token_id) or "").replace(SPACE_MARK, ""))

    def trim(self, text: str) -> str:
        """Return a text, or the beginning of one, without the space that encoding adds before a text."""
        return text[1:] if self._drops_first_space and text.startswith(" ") else text

    def _decode(self, token: str) -> bytes:
        if self._byte_of:
            # A token with a letter outside the alphabet is an added token, whose text is not encoded by bytes.
            values = [self._byte_of.get(letter) for letter in token]
            return token.encode() if None in values else bytes(byte for byte in values if byte is not None)
        for part in self._parts:
            if part["type"] == "ByteFallback" and (byte := _fallback_byte(token)) is not None:
                return byte
            if part["type"] == "Metaspace":
                token = token.replace(SPACE_MARK, " ")
            elif part["type"] == "Replace":
                token = token.replace(_pattern(part), str(part["content"]))
        return token.encode()


def _flat_parts(settings: Mapping[str, object]) -> list[Mapping[str, object]]:
    if settings.get("type") != "Sequence":
        return [settings]
    inner = settings.get("decoders")
    return [flat for part in inner for flat in _flat_parts(part)] if isinstance(inner, list) else []


def _is_bytewise(parts: Sequence[Mapping[str, object]]) -> bool:
    """Return whether tokens decode independently of each other, except at the beginning of a text."""
    kinds = [str(part["type"]) for part in parts]
    if "ByteLevel" in kinds:
        return kinds == ["ByteLevel"]
    for position, part in enumerate(parts):
        kind = kinds[position]
        if kind == "Strip":
            usual = (part.get("content"), part.get("start"), part.get("stop")) == (" ", 1, 0)
            if not usual or "Fuse" not in kinds[:position] or position != len(kinds) - 1:
                return False
        elif kind == "Replace":
            if len(_pattern(part)) != 1:
                return False
        elif kind == "Metaspace":
            if part.get("replacement") != SPACE_MARK:
                return False
        elif kind not in {"ByteFallback", "Fuse"}:
            return False
    return True


def _pattern(part: Mapping[str, object]) -> str:
    """Return the text that a part of a decoder replaces; "" for a regular expression."""
    pattern = part.get("pattern")
    return str(pattern.get("String", "")) if isinstance(pattern, dict) else ""


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None


def _byte_level_alphabet() -> dict[str, int]:
    """Return GPT-2's letters for bytes: printable bytes stand for themselves, the others are letters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + index): byte for index, byte in enumerate(others)}
