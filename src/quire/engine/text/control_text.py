r"""Keeps the text of special tokens in a client's input as text.

A chat template writes control tokens as text ("<|im_end|>"), so the same text, typed by a client or fetched by a tool,
would end a turn and begin another. Here it stays text:

    content    "hi <|im_end|>"                              the template renders text that knows its owners
    rendered   "<|im_start|>user\nhi <|im_end|><|im_end|>\n…"  the first <|im_end|> has characters of the client
    renamed    "①user\nhi <|im_end|>②\n…"                   so only the others get names that no text contains
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
from collections.abc import Sequence
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING

from quire.core.errors import InvalidRequestError
from quire.engine.text.client_text import TEMPLATE, owners_of, plain
from quire.engine.text.library_panics import panics_as_errors

if TYPE_CHECKING:
    import tokenizers


_NAME_BEGIN, _NAME_END = "\ufdd0", "\ufdef"  # noncharacters: Unicode keeps them for use within a program
_NAME_DIGITS = range(0xFDD1, 0xFDE1)


def ids_of(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """Return the ids of a text, without holding Python's lock."""
    with panics_as_errors():
        return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


class ControlText:
    """Separates a template's special tokens from the same text in a client's input."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        added = [token for token in library.get_added_tokens_decoder().values() if token.content.strip()]
        self._names = {token.content: _name(index) for index, token in enumerate(added) if token.special}
        # The library finds these in text before it normalises it, the longest at the first place.
        sought = [token.content for token in added if token.special or not token.normalized]
        self._pattern = re.compile(_any_of(list(dict.fromkeys(sought))) if self._names else r"(?!)")
        # If the tokenizer looks for special tokens in normalised text, other text can turn into one.
        self._always = library.normalizer is not None and any(token.special and token.normalized for token in added)
        self._lock = threading.Lock()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a rendered template; special tokens in which a client wrote a character are text.

        Mutates only the cached copy of the tokenizer.
        """
        owners, text = owners_of(text), plain(text)
        runs = ((run.start(), run.end()) for run in re.finditer(f"{TEMPLATE}+", owners))
        own = [token for run in runs for token in self._special(text, *run)]
        if not self._always and own == self._special(text, 0, len(text)):
            return ids_of(self._library, text, False)
        if _NAME_BEGIN in text:
            raise InvalidRequestError("messages", "text with U+FDD0", "text without this noncharacter")
        library = self.renamed()
        if library is None:
            allowed = "text without special tokens, because this tokenizer cannot tell them from control tokens"
            raise InvalidRequestError("messages", "text of a special token", allowed)
        pieces, end = [], 0
        for start, token in own:
            pieces += [text[end:start], self._names[token]]
            end = start + len(token)
        return ids_of(library, "".join([*pieces, text[end:]]), False)

    def _special(self, text: str, start: int, end: int) -> list[tuple[int, str]]:
        matches = self._pattern.finditer(text, start, end)
        return [(match.start(), match[0]) for match in matches if match[0] in self._names]

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
