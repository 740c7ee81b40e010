r"""Text to token ids and back, by the files of a model folder.

`tokenizers` (Rust) does the work, on tokenizer.json; `transformers` is not needed. Around it stand the things that a
server needs and a library leaves open:

**Special tokens in a client's words.** A chat template writes control tokens as text ("<|im_end|>"), so the same text
typed by a client, or fetched by a tool, would end a turn and begin another. Here it stays text:

    content    "hi <|im_end|>"          a character from a private plane, one that nobody used, stands for the text
    rendered   "<|im_start|>user\nhi ▯<|im_end|>\n…"        so the special tokens here are all the template's own
    renamed    "①user\nhi <|im_end|>②\n…"                   they get names that no text contains, the text comes back
    encoded    by a copy of the tokenizer in which ① and ② are the special tokens, and "<|im_end|>" is letters

It is encoded in one piece, so spaces and merges are those of ordinary text. (Encoding piece by piece, with the
library's `encode_special_tokens` for the client's, would put a prefix space at every seam, and would still give the
control token where the vocabulary has it as a piece.) The copy is made when it is first needed. A token that the
tokenizer does not call special, such as Qwen's "<think>", is text by its author's word, and a client may write it.
A plain prompt is taken as it is written, with its special tokens: whoever completes text wants to place them.

**The interpreter goes on.** `Tokenizer.encode` holds Python's lock while it works, a second for a megabyte, in which a
server would answer nobody; `encode_batch_fast` does not, and is twice as fast.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quire.core.errors import CheckpointError, InvalidRequestError
from quire.engine.chat_template import ChatTemplate, plain_object, require_unicode, validate_messages, validate_tools
from quire.engine.detokenizer import TokenBytes

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE: Final = "tokenizer.json"
SETTINGS_FILES: Final = ("special_tokens_map.json", "tokenizer_config.json")  # the later has the last word
MAX_FILE_BYTES: Final = 200_000_000
MAX_TEXT_CHARACTERS: Final = 8 << 20
NAMED_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_CONVERT: Final = (
    "a folder with tokenizer.json; with transformers installed, write one by: python -c "
    "\"from transformers import AutoTokenizer as A; A.from_pretrained('FOLDER').save_pretrained('FOLDER')\""
)


class Tokenizer:
    """The tokenizer of a model, with its chat templates. Immutable but for caches; threads may share it."""

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        templates: Mapping[str, ChatTemplate] | None = None,
        add_bos_token: bool = False,
    ) -> None:
        """Wrap a tokenizer of the library; `templates` are by name, and "default" is the one for any conversation."""
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._templates = dict(templates or {})
        added = library.get_added_tokens_decoder()
        self.vocab_size: int = max([-1, *library.get_vocab(with_added_tokens=True).values()]) + 1
        """One more than the highest id; a model may have more."""
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        named = named_tokens or {}
        self.bos_token_id = library.token_to_id(named.get("bos_token", ""))
        self.eos_token_id = library.token_to_id(named.get("eos_token", ""))
        self.pad_token_id = library.token_to_id(named.get("pad_token", ""))
        self.bytes_of_tokens = TokenBytes.of(library)
        self._first_id = self.bos_token_id if add_bos_token else None
        self._control = _ControlText(library)

    @classmethod
    def open(cls, folder: Path, *, vocab_size: int, now: Callable[[], datetime] = datetime.now) -> Tokenizer:
        """Read the tokenizer of a model folder; `vocab_size` is the model's, `now` the clock of its chat template.

        Raises `CheckpointError` where a file is missing or torn, or where the tokenizer has ids that the model lacks.
        """
        settings: dict[str, object] = {}
        for name in SETTINGS_FILES:
            settings |= {key: value for key, value in _read_object(folder / name).items() if value is not None}
        named = {name: text for name in NAMED_TOKENS if (text := _token_text(settings.get(name)))}
        library = _read_library(folder, settings)
        added = {token.content for token in library.get_added_tokens_decoder().values()}
        library.add_special_tokens(
            [text for text in named.values() if text not in added and library.token_to_id(text) is not None]
        )
        templates = {
            name: ChatTemplate(source, named, where=f"{folder}: chat template {name!r}", now=now)
            for name, source in _read_templates(folder, settings).items()
        }
        add_bos_token = settings.get("add_bos_token") is True
        tokenizer = cls(library, named_tokens=named, templates=templates, add_bos_token=add_bos_token)
        if tokenizer.vocab_size > vocab_size:
            found = f"a tokenizer of {tokenizer.vocab_size} ids"
            raise CheckpointError(str(folder), found, f"the {vocab_size} ids of the model's vocabulary, or fewer")
        return tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the model takes conversations."""
        return bool(self._templates)

    def warm_up(self) -> None:
        """Do now what the first special token in a client's words would wait for: 1.5 s for 150,000 tokens."""
        self._control.renamed()

    def has(self, token_id: int) -> bool:
        """Return whether an id is one of the tokenizer's."""
        return 0 <= token_id < self.vocab_size and self._library.id_to_token(token_id) is not None

    def encode(self, text: str, *, add_special_tokens: bool = True, field: str = "prompt") -> list[int]:
        """Return the ids of a text, in which special tokens may be written out; `field` names it in errors.

        `add_special_tokens` puts before it what the model was trained to see there, such as the token that begins
        every text. Does not mutate.
        """
        if not isinstance(text, str):
            raise InvalidRequestError(field, text, "a string")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise InvalidRequestError(field, f"{len(text)} characters", f"at most {MAX_TEXT_CHARACTERS}")
        require_unicode(text, field)
        ids = _ids(self._library, text, add_special_tokens)
        if add_special_tokens and self._first_id is not None and ids[:1] != [self._first_id]:
            ids.insert(0, self._first_id)
        return ids

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_variables: Mapping[str, object] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation as the model's chat template writes it. Does not mutate.

        Special tokens come from the template alone; their text in messages, tools and variables is text.
        """
        conversation, plain_tools = validate_messages(messages), validate_tools(tools)
        variables = plain_object(template_variables or {}, "template_variables")
        template = self._template(with_tools=plain_tools is not None)
        stand_ins, (conversation, plain_tools, variables) = self._control.replace(
            (conversation, plain_tools, variables), template.source
        )
        text = template.render(
            conversation, tools=plain_tools, add_generation_prompt=add_generation_prompt, variables=variables
        )
        require_unicode(text, "messages")
        return self._control.encode(text, stand_ins)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids that the tokenizer does not have have none. Does not mutate."""
        skipped = self.special_token_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in token_ids if token_id not in skipped and self.has(token_id)]
        token_bytes = self.bytes_of_tokens
        if token_bytes is None:
            return self._library.decode(shown, skip_special_tokens=False)
        data = b"".join([*map(token_bytes.first, shown[:1]), *map(token_bytes.__getitem__, shown[1:])])
        return token_bytes.trim(data.decode("utf-8", "replace"))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token within a text, a space before it included; those of a special token too."""
        if not self.has(token_id):
            return b""
        if self.bytes_of_tokens is None:
            return self._library.decode([token_id], skip_special_tokens=False).encode()
        return self.bytes_of_tokens[token_id]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token by itself, as log probabilities show it; part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        if not self._templates:
            raise InvalidRequestError("messages", "a conversation", "a plain prompt: this model has no chat template")
        return self._templates.get("tool_use" if with_tools else "default", self._templates["default"])


def _ids(library: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids


# --- special tokens in a client's words -----------------------------------------------------------

_NAME_BEGIN, _NAME_END = "\ufdd0", "\ufdef"  # noncharacters: Unicode keeps them for use within a program
_NAME_DIGITS = range(0xFDD1, 0xFDE1)
_PRIVATE_PLANES = (*range(0x100000, 0x10FFFE), *range(0xF0000, 0xFFFFE))


class _ControlText:
    """Keeps the special tokens that a template writes apart from the same text in what a client wrote."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        self._library = library
        special = {
            token.content: token.normalized
            for token in library.get_added_tokens_decoder().values()
            if token.special and token.content.strip()
        }
        self._names = {text: _name(index) for index, text in enumerate(special)}
        self._pattern = re.compile(_any_of(list(special)) if special else r"(?!)")
        # Where special tokens are looked for in normalised text, other text may turn into one.
        self._always = library.normalizer is not None and any(special.values())
        self._lock = threading.Lock()

    def replace(self, inputs: tuple[Any, ...], source: str) -> tuple[dict[str, str], tuple[Any, ...]]:
        """Return which character stands for which text, and the inputs with those characters in its place."""
        found = sorted({match[0] for text in _texts(inputs) for match in self._pattern.finditer(text)})
        if not found:
            return {}, inputs
        used = {char for text in (source, *_texts(inputs)) for char in text}
        free = (char for char in map(chr, _PRIVATE_PLANES) if char not in used)
        stand_ins = dict(zip(free, found, strict=False))
        if len(stand_ins) < len(found):
            raise InvalidRequestError("messages", "text of all private characters", "text that leaves one unused")
        char_of = {text: char for char, text in stand_ins.items()}
        return stand_ins, _map_texts(inputs, lambda text: self._pattern.sub(lambda match: char_of[match[0]], text))

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> list[int]:
        """Return the ids of a rendered template: its own special tokens are control, what a character stands for text.

        Mutates only the cached copy of the tokenizer.
        """
        if not stand_ins and not self._always:
            return _ids(self._library, text, False)
        if _NAME_BEGIN in text:
            raise InvalidRequestError("messages", "text with U+FDD0", "text without this noncharacter")
        named = self._pattern.sub(lambda match: self._names[match[0]], text)
        library = self.renamed()
        if library is None:
            allowed = "text without special tokens, which this tokenizer cannot tell from control tokens"
            raise InvalidRequestError("messages", "text of a special token", allowed)
        return _ids(library, named.translate({ord(char): text for char, text in stand_ins.items()}), False)

    def renamed(self) -> tokenizers.Tokenizer | None:
        """Return a copy of the tokenizer that has other names for its special tokens; None if there can be none."""
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
        except Exception:  # the library raises nothing narrower: merges build a special token out of letters
            return None


def _name(index: int) -> str:
    return _NAME_BEGIN + "".join(chr(_NAME_DIGITS[int(digit, 16)]) for digit in f"{index:x}") + _NAME_END


def _any_of(texts: Sequence[str]) -> str:
    """Return a pattern that matches the longest of some texts, in time that does not grow with their number."""
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


# --- the files of a folder ----------------------------------------------------------------------


def _read_library(folder: Path, settings: Mapping[str, object]) -> tokenizers.Tokenizer:
    import tokenizers

    path = folder / TOKENIZER_FILE
    text = _read_text(path)
    if text is None:
        return _read_byte_level_bpe(folder, settings)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library, which is no Exception, is a broken file too
        raise CheckpointError(str(path), f"broken: {error}", "a tokenizer that the tokenizers library reads") from error


def _read_byte_level_bpe(folder: Path, settings: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Build the tokenizer of GPT-2 from its two files; the files of other families do not say how to split words."""
    files = [(folder / name).is_file() for name in ("vocab.json", "merges.txt", "added_tokens.json")]
    if files != [True, True, False] or settings.get("tokenizer_class") not in {"GPT2Tokenizer", "GPT2TokenizerFast"}:
        found = "only tokenizer.model" if (folder / "tokenizer.model").is_file() else "without tokenizer.json"
        raise CheckpointError(str(folder), found, _CONVERT)
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(str(folder), f"broken: {error}", "vocab.json and merges.txt of one BPE") from error
    library = tokenizers.Tokenizer(model)
    prefix = settings.get("add_prefix_space") is True
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    return library


def _read_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name; where there are any, one is "default"."""
    source: object = _read_text(folder / "chat_template.jinja")
    for found in (settings.get("chat_template"), _read_object(folder / "chat_template.json").get("chat_template")):
        source = found if source is None else source
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    templates: dict[str, str] = {}
    for entry in source if isinstance(source, list) else [None]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            allowed = "a template, or a list of objects with name and template"
            raise CheckpointError(f"{folder}: chat_template", source, allowed)
        templates[name] = text
    if templates:
        templates.setdefault("default", next(iter(templates.values())))
    return templates


def _token_text(token: object) -> str | None:
    """Return the text of a token in a settings file: a string, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; an empty one where there is no such file."""
    text = _read_text(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(str(path), f"not JSON: {error}", "one JSON object") from error
    if not isinstance(value, dict):
        raise CheckpointError(str(path), f"a JSON {type(value).__name__}", "one JSON object")
    return value


def _read_text(path: Path) -> str | None:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CheckpointError(f"{path}: size", path.stat().st_size, f"at most {MAX_FILE_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(str(path), f"unreadable: {error}", "a text file in UTF-8") from error
