"""Reads the files of a model's tokenizer: tokenizer.json or vocabulary and merges, settings, chat templates.

Every file is checked while it is read: a missing, broken or unsupported part raises a `CheckpointError` that names the
file and the remedy.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, cast

from quire.core.errors import CheckpointError, ModelError
from quire.core.model_files import (
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_VALUES,
    SPACE_AT_END,
    ModelFiles,
    require_few_values,
)
from quire.core.pooling import PAIR_TEMPLATE

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE: Final = "tokenizer.json"
SETTINGS_FILES: Final = ("special_tokens_map.json", "tokenizer_config.json")  # the later one wins
MAX_TABLE_BYTES: Final = 4 << 20
LONG_TEXT: Final = re.compile(rb'(?<=")[^"]{4096,}')  # tried only after quotes: otherwise quadratic
SLOW_SPACE: Final = re.compile(r'("Regex"\s*+:\s*+)"\\\\s\+\$"')
MAX_TEMPLATES: Final = 16
MAX_STEPS: Final = 32  # steps of a normalizer or a decoder; published ones have five
MAX_GROWTH: Final = 64
USUAL_KEY_BYTES: Final = 3
"""Of a character that a table of characters replaces with a long text, such as U+FDFA; a table can do so for others."""
MAX_TOKEN_CHARACTERS: Final = 256
MAX_TOKENS_AROUND: Final = 64
SPLITS: Final = MappingProxyType(  # how classes of byte-level BPE split words; None: as in GPT-2
    {
        "GPT2Tokenizer": None,
        "Qwen2Tokenizer": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)
CLASSES: Final = MappingProxyType(  # by the model_type in config.json, if the tokenizer's settings have no class
    {"gpt2": "GPT2Tokenizer", **dict.fromkeys(("qwen2", "qwen3", "qwen3_moe"), "Qwen2Tokenizer")}
)
END_OF_TEXT: Final = "<|endoftext|>"  # the named tokens of GPT2Tokenizer, if its settings do not name them


def read_settings(files: ModelFiles) -> dict[str, object]:
    """Return the tokenizer's settings, with defaults by the model's type if the vocabulary is in two files."""
    settings: dict[str, object] = {}
    for name in SETTINGS_FILES:
        settings |= {key: value for key, value in _read_object(files, name).items() if value is not None}
    if files.has(TOKENIZER_FILE):
        return settings
    if "tokenizer_class" not in settings:
        model_type = _read_object(files, "config.json").get("model_type")
        settings["tokenizer_class"] = CLASSES.get(model_type) if isinstance(model_type, str) else None
    if settings["tokenizer_class"] in ("GPT2Tokenizer", "GPT2TokenizerFast"):
        settings = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT) | settings
    return settings


def read_library(files: ModelFiles, settings: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model; `settings` are those of `read_settings`."""
    import tokenizers

    if not files.has(TOKENIZER_FILE):
        return _read_byte_level_bpe(files, settings)
    text, where = files.text(TOKENIZER_FILE, MAX_TOKENIZER_BYTES), files.where(TOKENIZER_FILE)
    data = text.encode()
    require_few_values(data, where, MAX_TOKENIZER_VALUES)
    # One long text can be a table of characters. Others would be tokens, which take a hundred times their size.
    long_texts = long_texts_in(data.replace(b'\\"', b""))
    if len(long_texts) > 1 or sum(map(len, long_texts)) > MAX_TABLE_BYTES:
        found, allowed = f"texts of {max(map(len, long_texts))} bytes", "tokens as short as words"
        raise CheckpointError(where, found, allowed)
    try:
        library = tokenizers.Tokenizer.from_str(SLOW_SPACE.sub(_with_fast_space, text))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the library is not an Exception, but also means a broken file
        raise CheckpointError(where, f"broken: {error}", "a tokenizer that the tokenizers library reads") from error
    _require_bounded(library, where)
    return library


def long_texts_in(data: bytes) -> list[bytes]:
    """Return what `LONG_TEXT` matches; each match is around a half of 4096 bytes without a quote, which is rare."""
    has_quotes = (data.find(b'"', start, start + 2048) >= 0 for start in range(0, len(data) - 2047, 2048))
    return [] if all(has_quotes) else LONG_TEXT.findall(data)


def _with_fast_space(pattern: re.Match[str]) -> str:
    return f"{pattern[1]}{json.dumps(SPACE_AT_END)}"


def _require_bounded(library: tokenizers.Tokenizer, where: str) -> None:
    """Raise if normalizing, decoding or post-processing can make a text much larger, or splitting it take long."""
    for name, part in (("normalizer", library.normalizer), ("decoder", library.decoder)):
        steps = list(_steps_of(json.loads(part.__getstate__()))) if part is not None else []
        growth = math.prod(map(_growth, steps))
        if len(steps) > MAX_STEPS or growth > MAX_GROWTH:
            found = f"{len(steps)} steps that make a text {growth:.0f} times as long"
            raise CheckpointError(f"{where}: {name}", found, f"at most {MAX_STEPS} steps, {MAX_GROWTH} times as long")
    _require_short_pieces(library, where)
    longest = max((len(token.content) for token in library.get_added_tokens_decoder().values()), default=0)
    if longest > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(f"{where}: an added token", f"{longest} characters", f"at most {MAX_TOKEN_CHARACTERS}")
    count = library.num_special_tokens_to_add(is_pair=False)
    if count > MAX_TOKENS_AROUND:
        found, allowed = f"{count} tokens around each text", f"at most {MAX_TOKENS_AROUND}"
        raise CheckpointError(f"{where}: post_processor", found, allowed)


def _require_short_pieces(library: tokenizers.Tokenizer, where: str) -> None:
    """Raise if the time to split a word grows with the cube of its length, or a piece begins with very many others."""
    model: Any = library.model
    if (kind := type(model).__name__) == "WordPiece":
        field, longest = "max_input_chars_per_word", model.max_input_chars_per_word
    elif kind == "Unigram":
        ids = range(library.get_vocab_size(with_added_tokens=False))
        field, longest = "characters of a piece", max((len(library.id_to_token(each) or "") for each in ids), default=0)
    else:
        return
    if longest > MAX_TOKEN_CHARACTERS:
        raise CheckpointError(f"{where}: {field}", longest, f"at most {MAX_TOKEN_CHARACTERS}")


def _steps_of(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer or a decoder, also nested ones."""
    if settings.get("type") != "Sequence":
        yield settings
    for inner in settings.get("normalizers") or settings.get("decoders") or ():
        yield from _steps_of(inner)


def _growth(step: Mapping[str, Any]) -> float:
    """Return the factor by which a step can lengthen a text, without additions at its ends."""
    if step.get("type") == "ByteLevel":
        return 2
    if step.get("type") == "Precompiled":  # the size of a table, the table, and what it names: texts that end in a zero
        data = base64.b64decode(step["precompiled_charsmap"])
        texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
        return max(max(map(len, texts)) / USUAL_KEY_BYTES, 1)
    if step.get("type") != "Replace":
        return 1
    pattern = step["pattern"].get("String")
    shortest = 1 if pattern is None else len(pattern.encode())  # a regular expression can match a single character
    return float(max(len(step["content"].encode()) / shortest, 1)) if shortest else math.inf


def tokenizer_json(files: ModelFiles, vocab_size: int) -> dict[str, Any]:
    """Return a model's tokenizer.json, without the added tokens beyond the model's vocabulary."""
    tokenizer: dict[str, Any] = json.loads(read_library(files, read_settings(files)).to_str())
    added = [token for token in tokenizer["added_tokens"] if token["id"] < vocab_size]
    return tokenizer | {"added_tokens": added, "truncation": None, "padding": None}


def _no_tokenizer(files: ModelFiles) -> ModelError:
    found = ", only tokenizer.model" if files.has("tokenizer.model") else ""
    return ModelError(
        files.name,
        f"{files.name} has no tokenizer.json{found}. Make one, {_how_to_convert(files.name)}; or give the folder of "
        f"another tokenizer (--tokenizer FOLDER); or work with token ids only: LLM(..., skip_tokenizer_init=True)",
    )


def _how_to_convert(name: str) -> str:
    code = f"from transformers import AutoTokenizer as A; A.from_pretrained({name!r}).save_pretrained({name!r})"
    return f'with transformers and sentencepiece: python -c "{code}"'


def _read_byte_level_bpe(files: ModelFiles, settings: Mapping[str, object]) -> tokenizers.Tokenizer:
    """Build a byte-level BPE from its two files; the class of the tokenizer determines how to split words."""
    is_whole = files.has("vocab.json") and files.has("merges.txt")
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    added = _added_tokens(files, settings)
    if not is_whole or name not in SPLITS or not _read_object(files, "added_tokens.json").keys() <= set(added):
        raise _no_tokenizer(files)
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocab = files.json_object("vocab.json")
    lines = (line.removesuffix("\r") for line in files.text("merges.txt").split("\n"))
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    try:
        model = models.BPE(cast(Any, vocab), cast(Any, merges))
    except Exception as error:  # the library raises only this
        raise CheckpointError(files.name, f"broken: {error}", "vocab.json and merges.txt of one BPE") from error
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
            raise CheckpointError(files.name, found, "ids that follow those of vocab.json one by one")
    return library


_TOKEN_OPTIONS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _added_tokens(files: ModelFiles, settings: Mapping[str, object]) -> dict[str, tuple[int, dict[str, bool]]]:
    """Return the text of each added token → its id and options, in the order of ids."""
    decoder = settings.get("added_tokens_decoder") or {}
    added: dict[str, tuple[int, dict[str, bool]]] = {}
    for key, token in decoder.items() if isinstance(decoder, dict) else [("", None)]:
        text = token_text_of(token)
        if not isinstance(token, dict) or text is None or not key.isdecimal():
            allowed = "an object of id → a token with its content"
            raise CheckpointError(f"{files.name}: added_tokens_decoder", {key: token}, allowed)
        added[text] = int(key), {name: token[name] for name in _TOKEN_OPTIONS if isinstance(token.get(name), bool)}
    return dict(sorted(added.items(), key=lambda item: item[1][0]))


def read_templates(files: ModelFiles, settings: Mapping[str, object]) -> dict[str, str]:
    """Return the chat templates by name; if any is for conversations, one is "default"."""
    source: object = files.text("chat_template.jinja") if files.has("chat_template.jinja") else None
    for found in (settings.get("chat_template"), _read_object(files, "chat_template.json").get("chat_template")):
        source = found if source is None else source
    if source is None:
        return {}
    if isinstance(source, str):
        return {"default": source}
    if isinstance(source, list) and len(source) > MAX_TEMPLATES:
        raise CheckpointError(f"{files.name}: chat_template", f"{len(source)} templates", f"at most {MAX_TEMPLATES}")
    templates: dict[str, str] = {}
    for entry in source if isinstance(source, list) else [None]:
        name, text = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(text, str):
            allowed = "a template, or a list of objects with name and template"
            raise CheckpointError(f"{files.name}: chat_template", source, allowed)
        templates[name] = text
    if usual := [text for name, text in templates.items() if name != PAIR_TEMPLATE]:
        templates.setdefault("default", usual[0])
    return templates


def token_text_of(token: object) -> str | None:
    """Return the text of a token in a settings file: a string, or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _read_object(files: ModelFiles, file: str) -> dict[str, object]:
    """Return the JSON object in a file; an empty one if the file does not exist."""
    return files.json_object(file) if files.has(file) else {}
