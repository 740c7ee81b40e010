r"""Keeps the text of special tokens in a client's input as text.

A chat template writes control tokens as text ("<|im_end|>"), so the same text, typed by a client or fetched by a tool,
would end a turn and begin another. Here it stays text:

    content    "hi <|im_end|>"                              an unused character of a private plane replaces the text
    rendered   "<|im_start|>user\nhi ▯<|im_end|>\n…"        so all special tokens here are the template's own
    renamed    "①user\nhi <|im_end|>②\n…"                   they get names that no text contains; the text is put back
    encoded    by a copy of the tokenizer in which ① and ② are the special tokens, and "<|im_end|>" is ordinary text

The text is encoded in one piece, so spaces and merges are those of ordinary text. (Encoding piece by piece, with the
library's `encode_special_tokens` for the client's pieces, would put a prefix space at every seam, and would still
produce the control token if the vocabulary has it as a piece.) The copy is made when it is first needed. A token that
the tokenizer does not mark as special, such as Qwen's "<think>", is text by its author's choice, and a client can write
it. A plain prompt keeps its special tokens: clients that complete text want to place them.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from quire.core.errors import InvalidRequestError
from quire.engine.text.library_panics import panics_as_errors

if TYPE_CHECKING:
    import tokenizers


_NAME_BEGIN, _NAME_END = "\ufdd0", "\ufdef"  # noncharacters: Unicode keeps them for use within a program
_NAME_DIGITS = range(0xFDD1, 0xFDE1)
_PRIVATE_PLANES = (*range(0x100000, 0x10FFFE), *range(0xF0000, 0xFFFFE))


def ids_of(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text, without holding Python's lock."""
    with panics_as_errors():
        return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


def unused_characters(count: int, inputs: tuple[Any, ...], source: str) -> list[str]:
    """Return private characters that neither a client's inputs nor the source of a template contains."""
    used = {char for text in (source, *_texts(inputs)) for char in text}
    free = list(islice((char for char in map(chr, _PRIVATE_PLANES) if char not in used), count))
    if len(free) < count:
        raise InvalidRequestError("messages", "text of all private characters", "text that leaves one unused")
    return free


class ControlText:
    """Separates a template's special tokens from the same text in a client's input."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        special = {
            token.content: token.normalized
            for token in library.get_added_tokens_decoder().values()
            if token.special and token.content.strip()
        }
        self._names = {text: _name(index) for index, text in enumerate(special)}
        self._pattern = re.compile(_any_of(list(special)) if special else r"(?!)")
        # If the tokenizer looks for special tokens in normalised text, other text can turn into one.
        self._always = library.normalizer is not None and any(special.values())
        self._lock = threading.Lock()

    def replace(self, inputs: tuple[Any, ...], source: str) -> tuple[dict[str, str], tuple[Any, ...]]:
        """Return the stand-in characters with their texts, and the inputs with each text replaced by its character."""
        found = sorted({match[0] for text in _texts(inputs) for match in self._pattern.finditer(text)})
        if not found:
            return {}, inputs
        stand_ins = dict(zip(unused_characters(len(found), inputs, source), found, strict=True))
        char_of = {text: char for char, text in stand_ins.items()}
        return stand_ins, _map_texts(inputs, lambda text: self._pattern.sub(lambda match: char_of[match[0]], text))

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Return the ids of a rendered template, with its own special tokens, and the stand-ins' texts as text.

        Mutates only the cached copy of the tokenizer.
        """
        if not stand_ins and not self._always:
            return ids_of(self._library, text, False)
        if _NAME_BEGIN in text:
            raise InvalidRequestError("messages", "text with U+FDD0", "text without this noncharacter")
        named = self._pattern.sub(lambda match: self._names[match[0]], text)
        library = self.renamed()
        if library is None:
            allowed = "text without special tokens, because this tokenizer cannot tell them from control tokens"
            raise InvalidRequestError("messages", "text of a special token", allowed)
        return ids_of(library, named.translate({ord(char): text for char, text in stand_ins.items()}), False)

    def renamed(self) -> tokenizers.Tokenizer | None:
        """Return a copy of the tokenizer with other names for its special tokens; None if that is impossible."""
        with self._lock:
            return self._renamed

    @cached_property
    def _renamed(self) -> tokenizers.Tokenizer | None:
        import tokenizers

        settings = json.loads(self._library.to_str())
        settings |= {"post_processor": None, "decoder": None}
        names, model = self._names, settings["model"]
        for token in settings["added_tokens"]:
            if token["content"] in names:
                token |= {"content": names[token["content"]], "normalized": False}
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): number for text, number in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        try:
            return tokenizers.Tokenizer.from_str(json.dumps(settings))
        except Exception:  # the library raises only this: merges build a special token out of letters
            return None


def _name(index: int) -> str:
    return _NAME_BEGIN + "".join(chr(_NAME_DIGITS[int(digit, 16)]) for digit in f"{index:x}") + _NAME_END


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches the longest of some texts, in time independent of their number."""
    prefix = commonprefix(texts)  # noqa: RUF071 - character by character is the point
    tails: dict[str, list[str]] = {}
    for text in texts:
        if text != prefix:
            tails.setdefault(text[len(prefix)], []).append(text[len(prefix) :])
    branches = "|".join(_any_of(group) for group in tails.values())
    return re.escape(prefix) + (f"(?:{branches})" if branches else "") + ("?" if branches and prefix in texts else "")


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_texts(item, change) for item in value)
    return value
