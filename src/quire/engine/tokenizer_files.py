"""The tokenizer's files of a model folder: tokenizer.json or vocabulary and merges, settings, chat templates.

Everything is checked as it is read: whatever is missing, torn or not understood is a `CheckpointError` that names the
file and says what to do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from quire.core.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE: Final = "tokenizer.json"
SETTINGS_FILES: Final = ("special_tokens_map.json", "tokenizer_config.json")  # the later has the last word
MAX_FILE_BYTES: Final = 200_000_000
SPLITS: Final = MappingProxyType(  # how classes of byte-level BPE split words; None: as GPT-2 did
    {
        "GPT2Tokenizer": None,
        "Qwen2Tokenizer": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
CLASSES: Final = MappingProxyType(  # by the model_type in config.json, where the tokenizer's settings do not say
    {"gpt2": "GPT2Tokenizer", **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer")}
)
END_OF_TEXT: Final = "<|endoftext|>"  # the named tokens of GPT2Tokenizer, where its settings do not say


def read_settings(folder: Path) -> dict[str, object]:
    """Return what the files of settings say, and what follows from the model where the vocabulary is two files."""
    settings: dict[str, object] = {}
    for name in SETTINGS_FILES:
        settings |= {key: value for key, value in _read_object(folder / name).items() if value is not None}
    if (folder / TOKENIZER_FILE).exists():
        return settings
    if "tokenizer_class" not in settings:
        model_type = _read_object(folder / "config.json").get("model_type")
        settings["tokenizer_class"] = CLASSES.get(model_type) if isinstance(model_type, str) else None
    if settings["tokenizer_class"] in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        settings = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) | settings
    return settings


def read_library(folder: Path, settings: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a folder; `settings` are those of `read_settings`."""
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


def tokenizer_json(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return a folder's tokenizer as tokenizer.json says it, without added tokens that a model of so many ids lacks."""
    tokenizer: dict[str, Any] = json.loads(read_library(folder, read_settings(folder)).to_str())
    added = [token for token in tokenizer["added_tokens"] if token["id"] < vocab_size]
    return tokenizer | {"added_tokens": added, "truncation": None, "padding": None}


def _how_to_convert(folder: Path) -> str:
    name = str(folder)
    code = f"from transformers import AutoTokenizer as A; A.from_pretrained({name!r}).save_pretrained({name!r})"
    return f'a folder with tokenizer.json; with transformers and sentencepiece installed: python -c "{code}"'


def _read_byte_level_bpe(folder: Path, settings: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Build a byte-level BPE from its two files, where the class of the tokenizer says how to split words."""
    files = [(folder / name).is_file() for name in ("vocab.json", "merges.txt")]
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    added = _added_tokens(folder, settings)
    if not all(files) or name not in SPLITS or not _read_object(folder / "added_tokens.json").keys() <= set(added):
        found = "only tokenizer.model" if (folder / "tokenizer.model").is_file() else "without tokenizer.json"
        raise CheckpointError(str(folder), found, _how_to_convert(folder))
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    try:
        model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(str(folder), f"broken: {error}", "vocab.json and merges.txt of one BPE") from error
    library = tokenizers.Tokenizer(model)
    prefix, split = settings.get("add_prefix_space") is True, SPLITS[name]
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split is None)
    if split is not None:
        words = pre_tokenizers.Split(tokenizers.Regex(split), behavior="isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence([words, library.pre_tokenizer])
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    for text, (token_id, options) in added.items():
        library.add_tokens([tokenizers.AddedToken(text, **options)])
        if library.token_to_id(text) != token_id:
            found = f"an added token {text!r} with id {token_id}"
            raise CheckpointError(str(folder), found, "ids that follow those of vocab.json one by one")
    return library


_TOKEN_OPTIONS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _added_tokens(folder: Path, settings: Mapping[str, object]) -> dict[str, tuple[int, dict[str, bool]]]:
    """Return the text of each added token → its id and options, in the order of ids."""
    decoder = settings.get("added_tokens_decoder") or {}
    added: dict[str, tuple[int, dict[str, bool]]] = {}
    for key, token in decoder.items() if isinstance(decoder, dict) else [("", None)]:
        text = token_text_of(token)
        if not isinstance(token, dict) or text is None or not key.isdecimal():
            allowed = "an object of id → a token with its content"
            raise CheckpointError(f"{folder}: added_tokens_decoder", {key: token}, allowed)
        added[text] = int(key), {name: token[name] for name in _TOKEN_OPTIONS if isinstance(token.get(name), bool)}
    return dict(sorted(added.items(), key=lambda item: item[1][0]))


def read_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
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


def token_text_of(token: object) -> str | None:
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
