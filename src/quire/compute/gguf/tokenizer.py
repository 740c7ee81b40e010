"""The tokenizer of a GGUF file as tokenizer.json and tokenizer_config.json, which one reader checks for all models.

Three kinds are read here. Byte-level BPE ("gpt2") has a list of merges, and its splitter has a name (`pre`).
SentencePiece ("llama") has pieces with scores, from which the merges follow: every way to cut a piece into two pieces,
the best score first. Gemma 4 ("gemma4") has pieces as SentencePiece has them, with a list of merges; files of Ollama
say so by `pre`, and those of Gemma 3n by their architecture only. The tokenizers of encoders are in encoders.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from quire.compute.gguf.encoders import SPACE, around, template, unigram_parts, word_piece_parts, word_pieces
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.vocabulary import CONTROL, NO_TOKEN, scores_of, vocabulary
from quire.compute.models.config_file import ConfigFile
from quire.core.model_files import MAX_TOKENIZER_BYTES, MAX_TOKENIZER_VALUES, SPACE_AT_END
from quire.core.pooling import INSTRUCTION, PAIR_TEMPLATE

GEMMA4: Final = "gemma4"
GEMMA3N: Final = "gemma3n"
WORD_PIECES, UNIGRAM = "bert", "t5"
OF_ENCODERS: Final = (WORD_PIECES, UNIGRAM)
"""Tokenizers whose first and last token are in tokenizer.json."""

RERANK: Final = "rerank"  # the name of a template that is not Jinja: {query} and {document} are replaced
USER_DEFINED: Final = 4  # of tokenizer.ggml.token_type
ALONE: Final = ("<unk>", "<s>", "<|endoftext|>")
"""The special tokens of Phi-3 that do not take the white space after them along."""

NAMED: Final = MappingProxyType(
    {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding"}
)
"""The name of a token in tokenizer_config.json → its name in GGUF, including a typo."""

TURNS: Final = (
    "{{ bos_token }}"
    "{% if messages[0].role == 'system' %}{% set before, turns = messages[0].content + '\n\n', messages[1:] %}"
    "{% else %}{% set before, turns = '', messages %}{% endif %}"
    "{% for turn in turns %}"
    "{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles of messages must alternate: user, assistant, user, assistant and so on') }}{% endif %}"
    "<start_of_turn>{{ 'model' if turn.role == 'assistant' else turn.role }}\n"
    "{{ before if loop.first else '' }}{{ turn.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
"""The chat template of Gemma 3n, for its files that have none: those of Ollama."""

MAX_CHARACTERS: Final = 4 << 20
"""The limit for a SentencePiece vocabulary, twice the largest one's count: pieces are cut at each character."""

MAX_PIECE_CHARACTERS: Final = 512
"""The limit for one piece: cutting it everywhere takes time quadratic in its length."""

MERGE_BYTES: Final = 8
MERGE_VALUES: Final = 3
"""Of a merge in tokenizer.json: quotes, brackets and commas next to its piece; a list and two texts."""

CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
OTHERS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SIGNS_IN_LINE: Final = OTHERS.replace(r"[\r\n]*", "", 1)
"""The same, with the ends of lines after a sign as a word of their own."""

SPACES: Final = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"|\s{1}"
"""Runs of spaces in lengths that are powers of two: Jais 2."""

UPPER: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
SLASHES: Final = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CAPITALS: Final = rf"{UPPER}*{LOWER}+{CONTRACTIONS}?|{UPPER}+{LOWER}*{CONTRACTIONS}?"
IDEOGRAPHS: Final = r"[\x{800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
YOUNG: Final = (
    r"\x{560}-\x{588}\x{10C7}-\x{10FF}\x{1C80}-\x{1C8F}\x{2D00}-\x{2D2D}\x{A790}-\x{A7FF}\x{AB30}-\x{AB68}"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D8F}\x{16E40}-\x{16EFF}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DFFF}"
)
CASED: Final = rf"(?:(?![{YOUNG}])[\p{{Lu}}\p{{Ll}}\p{{Lt}}])+"
"""Letters with cases that DeepSeek's first models know: none of Georgian, mathematics or newer scripts."""

SIGNS: Final = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"


WORDS: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""GPT-2's pattern, for use before another step."""

THREE_DIGITS: Final = (r"\p{N}+", r"^\p{N}{1,2}(?=(?:\p{N}{3})+$)", r"\p{N}{1,3}")
"""Groups of three digits, counted from the last one: runs, then what is before their first whole group, then groups."""

ASIAN: Final = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E00}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
"""Scripts whose runs are words in AFMoE: Chinese, Japanese, Thai, Lao, Khmer, Burmese and Korean."""

YOUTU_SCRIPTS: Final = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}"
    r"\x{FF1B}\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}"
    r"\x{30A0}-\x{30FF}]+"
)
PHRASES: Final = (
    rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
"""Words of several letters with a space between them are one: K-EXAONE."""

DEEPSEEK3: Final = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitter:
    """The patterns that split a text into words before merging; each applies to the results of the previous one.

    `then_gpt2`: their results are split as in GPT-2. `whole_words`: a word in the vocabulary is one token, without
    merging. `begins`: a text begins with a special token, unless the file specifies otherwise.
    """

    patterns: tuple[str, ...] = ()
    then_gpt2: bool = False
    whole_words: bool = False
    begins: bool = False
    composes: bool = False  # NFC


GPT2: Final = Splitter(then_gpt2=True)
DIGITS: Final = Splitter((r"\p{N}",), then_gpt2=True)
LLAMA3: Final = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{OTHERS}"
SINGLE_DIGITS: Final = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{OTHERS}"
QWEN2: Final = Splitter((SINGLE_DIGITS,), composes=True)
MARKED: Final = SINGLE_DIGITS.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
"""Single digits, with marks as a part of words."""

SPLITTERS: Final = MappingProxyType(
    {
        "gpt-2": GPT2,
        "phi-2": GPT2,
        "exaone": DIGITS,
        "exaone4": GPT2,
        "falcon": Splitter((r"[\p{P}\$\+<=>\^~\|`]+", WORDS, r"[0-9][0-9][0-9]")),
        "mellum": GPT2,
        "modern-bert": Splitter(then_gpt2=True, composes=True),
        "olmo": GPT2,
        **dict.fromkeys(("command-r", "minerva-7b", "refact", "smollm", "starcoder"), DIGITS),  # Granite has refact
        **dict.fromkeys(
            ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "jina-v5-nano", "lfm2", "pixtral"),
            Splitter((LLAMA3,), whole_words=True, begins=True),
        ),
        **dict.fromkeys(("glm4", "chatglm-bpe"), Splitter((LLAMA3,), whole_words=True)),
        **dict.fromkeys(("dbrx", "smaug-bpe"), Splitter((LLAMA3,))),  # Phi-4 has the first
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "hunyuan", "megrez", "solar-open"), QWEN2),
        "qwen35": Splitter((MARKED,), composes=True),
        "jais-2": Splitter((LLAMA3.replace(r"\s+(?!\S)|\s+", SPACES),)),
        "stablelm2": Splitter((SINGLE_DIGITS,)),
        "seed-coder": Splitter((SINGLE_DIGITS.replace(OTHERS, SIGNS_IN_LINE),)),  # Seed-OSS
        "tekken": Splitter((rf"{UPPER}*{LOWER}+|{UPPER}+{LOWER}*|\p{{N}}|{SLASHES}",), whole_words=True, begins=True),
        **dict.fromkeys(
            ("gpt-4o", "llama4", "minimax-m2"), Splitter((rf"{CAPITALS}|\p{{N}}{{1,3}}|{SLASHES}",))
        ),  # Phi-4-mini
        "youtu": Splitter((YOUTU_SCRIPTS, rf"{CAPITALS}|\p{{N}}|{SLASHES}"), whole_words=True),
        "afmoe": Splitter((*THREE_DIGITS, ASIAN, DEEPSEEK3)),
        "exaone-moe": Splitter((PHRASES,)),
        "deepseek-llm": Splitter(
            (r"[\r\n]", rf"\s?{CASED}", rf"\s?{SIGNS}", SPACE_AT_END, IDEOGRAPHS, r"\p{N}+"),
        ),
        **dict.fromkeys(
            ("deepseek-v3", "hunyuan-dense"),
            Splitter((r"\p{N}{1,3}", r"[一-龥\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+", DEEPSEEK3)),
        ),
        "deepseek-coder": Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", IDEOGRAPHS, r"\p{N}")),
    }
)
"""`tokenizer.ggml.pre` → the splitter."""


def tokenizer_json_of(header: GgufHeader) -> str:
    """Return tokenizer.json for a file. Does not mutate."""
    file = ConfigFile(str(header.path), dict(header.settings))
    tokens, kinds = vocabulary(file)
    kind = file.fields.get("tokenizer.ggml.model")
    if kind == WORD_PIECES:
        tokens = word_pieces(tokens, kinds)
    ids = {token: place for place, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise file.error("tokenizer.ggml.tokens", "a list of distinct tokens")
    if _is_gemma(file):
        parts = _pieces(file, ids, _listed_merges(file), has_prefix=False)
    elif kind == "gpt2":
        parts = _byte_level(file, ids)
    elif kind == "llama":
        parts = _sentence_pieces(file, ids)
    elif kind == WORD_PIECES:
        parts = word_piece_parts(file, ids)
    elif kind == UNIGRAM:
        parts = unigram_parts(file, ids)
    else:
        known = "gpt2 (byte-level BPE), llama (SentencePiece), bert (word pieces), t5 (pieces with scores) or gemma4"
        raise file.error("tokenizer.ggml.model", known)
    if _is_in_tokens(file):
        parts["post_processor"] = around(file, tokens)
    elif kind not in OF_ENCODERS and file.flag("tokenizer.ggml.add_eos_token", False):
        last = file.size("tokenizer.ggml.eos_token_id", low=0, high=len(tokens) - 1)
        parts["post_processor"] = template(tokens, ["A", last], ["A", last, "B", last])
    takes_space = kind == "llama" and file.fields.get("general.architecture") == "phi3"
    added = [
        _added_token(place, tokens[place], special=found == CONTROL, takes_space=takes_space)
        for place, found in enumerate(kinds)
        if found in (CONTROL, USER_DEFINED)
    ]
    return json.dumps({"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, **parts})


def tokenizer_config_of(header: GgufHeader) -> dict[str, object]:
    """Return tokenizer_config.json for a file: its named tokens, and its chat templates. Does not mutate."""
    file = ConfigFile(str(header.path), dict(header.settings))
    tokens, _ = vocabulary(file)
    settings: dict[str, object] = {}
    for name, theirs in NAMED.items():
        key = f"tokenizer.ggml.{theirs}_token_id"
        if file.is_set(key) and file.fields[key] != NO_TOKEN:
            settings[name] = tokens[file.size(key, low=0, high=len(tokens) - 1)]
    begins = file.flag("tokenizer.ggml.add_bos_token", _begins(file)) or _is_gemma(file)  # whose first files say false
    is_step = _is_in_tokens(file) or file.fields.get("tokenizer.ggml.model") in OF_ENCODERS  # of tokenizer.json
    settings["add_bos_token"] = begins and not is_step
    if templates := _templates(file):
        settings["chat_template"] = templates
    return settings


def _is_in_tokens(file: ConfigFile) -> bool:
    """Return whether a text is between two tokens, as ModernBERT's byte-level BPE has it."""
    is_byte_level = file.fields.get("tokenizer.ggml.model") == "gpt2"
    return is_byte_level and file.flag("tokenizer.ggml.add_sep_token", False)


def _begins(file: ConfigFile) -> bool:
    """Return whether texts begin with a special token by default."""
    pre = file.fields.get("tokenizer.ggml.pre")
    is_byte_level = file.fields.get("tokenizer.ggml.model") == "gpt2"
    return not is_byte_level or (isinstance(pre, str) and pre in SPLITTERS and SPLITTERS[pre].begins)


def _is_gemma(file: ConfigFile) -> bool:
    """Return whether pieces have a list of merges: in files of Gemma 4, and of Gemma 3n from Ollama."""
    kind = file.fields.get("tokenizer.ggml.model")
    return GEMMA4 in (kind, file.fields.get("tokenizer.ggml.pre")) or (kind == "gpt2" and _is_gemma3n(file))


def _is_gemma3n(file: ConfigFile) -> bool:
    return file.fields.get("general.architecture") == GEMMA3N


def _templates(file: ConfigFile) -> str | list[dict[str, object]] | None:
    """Return the chat template, or all of them by name."""
    plain = "tokenizer.chat_template"
    found = {
        key.removeprefix(plain).removeprefix("."): text for key, text in file.fields.items() if key.startswith(plain)
    }
    for name, text in found.items():
        if not isinstance(text, str) and not name.endswith("s"):
            raise file.error(f"{plain}.{name}".removesuffix("."), "a text")
    texts = {name or "default": text for name, text in found.items() if isinstance(text, str)}
    if RERANK in texts:
        texts[PAIR_TEMPLATE] = _pair_template(texts.pop(RERANK))
    if texts.keys() <= {"default"}:
        return texts.get("default", TURNS if _is_gemma3n(file) else None)
    return [{"name": name, "template": text} for name, text in texts.items()]


def _pair_template(text: str) -> str:
    """Return a text with placeholders for a query and a document as a Jinja template for three messages."""
    places = {"{query}": 1, "{document}": 2, INSTRUCTION: 0}
    pieces = re.split("(" + "|".join(map(re.escape, places)) + ")", text)
    written = [
        f"messages[{places[piece]}].content" if piece in places else json.dumps(piece, ensure_ascii=False)
        for piece in pieces
        if piece
    ]
    return "".join(f"{{{{ {piece} }}}}" for piece in written)


def _added_token(token_id: int, text: str, *, special: bool, takes_space: bool) -> dict[str, object]:
    """Return a token that is found in texts; `takes_space`: with the white space after it, as Phi-3 has it."""
    plain = dict.fromkeys(("single_word", "lstrip", "normalized"), False)
    return {"id": token_id, "content": text, "special": special, "rstrip": takes_space and text not in ALONE, **plain}


def _byte_level(file: ConfigFile, ids: dict[str, int]) -> dict[str, Any]:
    """Return the parts of a byte-level BPE."""
    pre = file.fields.get("tokenizer.ggml.pre")
    if file.fields.get("general.architecture") == "mistral3" and pre in (None, "default"):  # in files of Ollama
        pre = "tekken"
    if not isinstance(pre, str) or pre not in SPLITTERS:
        raise file.error("tokenizer.ggml.pre", f"one of {', '.join(SPLITTERS)}")
    splitter = SPLITTERS[pre]
    merges = _listed_merges(file)
    steps: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in splitter.patterns
    ]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": splitter.then_gpt2,
    }
    return {
        "normalizer": {"type": "NFC"} if splitter.composes else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*steps, byte_level]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": _bpe(ids, merges, ignore_merges=splitter.whole_words),
    }


def _listed_merges(file: ConfigFile) -> Sequence[Sequence[str]]:
    merges = file.texts("tokenizer.ggml.merges")
    if any(merge.count(" ") != 1 for merge in merges):
        raise file.error("tokenizer.ggml.merges", "pairs of tokens with one space between them")
    # The library reads texts faster than pairs, but takes a text that begins like this for a comment.
    if any(merge.startswith("#version") for merge in merges):
        return [merge.split(" ") for merge in merges]
    return merges


def _sentence_pieces(file: ConfigFile, ids: dict[str, int]) -> dict[str, Any]:
    """Return the parts of a BPE that is equivalent to SentencePiece with these pieces."""
    scores = scores_of(file, len(ids))
    has_prefix = file.flag("tokenizer.ggml.add_space_prefix", True)
    if max(map(len, ids), default=0) > MAX_PIECE_CHARACTERS:
        raise file.error("tokenizer.ggml.tokens", f"pieces of at most {MAX_PIECE_CHARACTERS} characters")
    if sum(map(len, ids)) > MAX_CHARACTERS:
        raise file.error("tokenizer.ggml.tokens", f"pieces of at most {MAX_CHARACTERS} characters together")
    return _pieces(file, ids, _merges(file, ids, scores), has_prefix=has_prefix)


def _pieces(
    file: ConfigFile, ids: dict[str, int], merges: Sequence[Sequence[str]], *, has_prefix: bool
) -> dict[str, Any]:
    """Return the parts of a BPE of pieces with a mark for each space; `has_prefix`: one before each text, too."""
    spaces: dict[str, Any] = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces] if has_prefix else [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.size("tokenizer.ggml.unknown_token_id", 0, low=0, high=len(ids) - 1)
    model = _bpe(ids, merges, ignore_merges=False)
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model | {"unk_token": list(ids)[unknown], "fuse_unk": True, "byte_fallback": True},
    }


def _bpe(ids: dict[str, int], merges: Sequence[Sequence[str]], *, ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": ids,
        "merges": merges,
    }


def _merges(file: ConfigFile, ids: dict[str, int], scores: Sequence[Any]) -> list[tuple[str, str]]:
    """Return every way to cut a piece into two pieces, in order of the piece's score, then of the parts' ids.

    Raises for more merges than tokenizer.json may hold: a piece of n characters may have n - 1, each as long as itself.
    """
    merges: list[tuple[Any, int, int]] = []
    num_bytes = 0
    for piece, place in ids.items():
        num_before = len(merges)
        for cut in range(1, len(piece)):
            left, right = ids.get(piece[:cut]), ids.get(piece[cut:])
            if left is not None and right is not None:
                merges.append((-scores[place], left, right))
        if len(merges) > num_before:
            num_bytes += (len(merges) - num_before) * (len(json.dumps(piece)) + MERGE_BYTES)
            if num_bytes > MAX_TOKENIZER_BYTES or len(merges) * MERGE_VALUES > MAX_TOKENIZER_VALUES:
                most = f"{MAX_TOKENIZER_BYTES >> 20} MiB"
                raise file.error("tokenizer.ggml.tokens", f"pieces whose merges fit in a tokenizer.json of {most}")
    merges.sort()
    pieces = list(ids)
    return [(pieces[left], pieces[right]) for _, left, right in merges]
