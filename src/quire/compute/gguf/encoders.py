"""GGUF files of encoders: their settings, and the tokenizers that only they have.

BERT's word pieces ("bert") begin with a mark if they begin a word; Hugging Face marks the others. XLM-RoBERTa has
pieces with scores ("t5"), of which the best cut of a word is chosen, and a table that replaces characters. Older files
do not say whether BERT's words are in lower case: they are if no piece begins with a letter from A to Z.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from quire.compute.gguf.header import GgufTensor
from quire.compute.gguf.name_tables.encoders import TOKEN_TYPES
from quire.compute.gguf.named_settings import NEAR_BASE, PATTERN, Settings
from quire.compute.gguf.vocabulary import CONTROL, scores_of
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import FULL, LOCAL_BASE, SLIDING

ENCODERS: Final = frozenset({"bert", "eurobert", "gemma-embedding", "jina-bert-v3", "modern-bert", "nomic-bert"})
"""Architectures whose tokens attend to later ones."""

SPACE: Final = "\u2581"
CONTINUES: Final = "##"
CAPITAL: Final = re.compile(r"(##)?[A-Z]")  # lower case leaves some others as they are, such as that of real numbers
FIRST: Final = ("cls", "bos")
LAST: Final = ("seperator", "eos")  # with the typo of the format
ACCENTS: Final = "tokenizer.ggml.normalizer.strip_accents"
MOST_BYTES: Final = 4 << 20
"""Of the table that replaces characters; that of NFKC, which published models have, has 237,539."""


def encoder_settings(settings: Settings, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    """Return the settings of an encoder in addition to Llama's: the rows of its tables are those of their tensors."""
    if settings.file.flag(settings.key("attention.causal"), False):
        raise settings.file.error(settings.key("attention.causal"), "false: each token attends to later ones")
    if settings.architecture in ("gemma-embedding", "gemma3"):
        size = settings.size("attention.key_length", 256)
        local = settings.number("rope.local.freq_base", LOCAL_BASE)  # as files of Ollama name it
        return {
            "architectures": ["Gemma3TextModel"],
            **{"head_dim": size, "query_pre_attn_scalar": size, "rms_norm_unit_offset": False},
            **{"sliding_window": settings.size("attention.sliding_window"), "use_bidirectional_attention": True},
            "rope_local_base_freq": settings.number(NEAR_BASE, local),
        }
    if settings.architecture == "modern-bert":
        return _modern_bert(settings)
    tables = {TOKEN_TYPES: "type_vocab_size", "position_embd.weight": "max_position_embeddings"}
    sizes = {ours: tensors[theirs].shape[0] for theirs, ours in tables.items() if theirs in tensors}
    is_distilled = settings.architecture == "bert" and TOKEN_TYPES not in tensors
    return {**sizes, "architectures": ["DistilBertModel"]} if is_distilled else {**sizes}


def _modern_bert(settings: Settings) -> dict[str, object]:
    """Return the settings of ModernBERT. Files do not say which states a head reads: llama.cpp takes their mean."""
    if settings.word("rope.scaling.type") not in (None, "none"):
        raise settings.file.error(settings.key("rope.scaling.type"), "none")
    bases = {FULL: ("rope.freq_base", 160_000.0), SLIDING: (NEAR_BASE, 10_000.0)}
    ropes = {kind: {"rope_type": "default", "rope_theta": settings.number(*each)} for kind, each in bases.items()}
    return {
        "classifier_pooling": "mean",
        "global_attn_every_n_layers": settings.size(PATTERN, 3),
        "hidden_activation": settings.word("hidden_act"),
        "local_attention": settings.size("attention.sliding_window"),
        "rope_parameters": ropes,
        "rope_scaling": None,
    }


def is_encoder(settings: Settings) -> bool:
    """Return whether a file is an encoder; EmbeddingGemma is a Gemma 3 with a pooling in files of Ollama."""
    return settings.architecture in ENCODERS or (settings.architecture == "gemma3" and settings.has("pooling_type"))


def word_pieces(tokens: Sequence[str], kinds: Sequence[Any]) -> list[str]:
    """Return word pieces as Hugging Face marks them.

    >>> word_pieces(["[CLS]", "\u2581block", "s", "\u2581["], [3, 1, 1, 1])
    ['[CLS]', 'block', '##s', '[']
    """
    marked: list[str] = []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == CONTROL or (token.startswith("[") and token.endswith("]") and len(token) > 1):
            marked.append(token)
        else:
            marked.append(token.removeprefix(SPACE) if token.startswith(SPACE) else CONTINUES + token)
    return marked


def word_piece_parts(file: ConfigFile, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the parts of tokenizer.json for word pieces, with Hugging Face's marks."""
    pieces = list(ids)
    unknown = file.size("tokenizer.ggml.unknown_token_id", ids.get("[UNK]", 0), low=0, high=len(ids) - 1)
    lowercase = file.flag("tokenizer.ggml.normalizer.lowercase", not any(map(CAPITAL.match, pieces)))
    strips = file.flag(ACCENTS, False) if file.is_set(ACCENTS) else None
    return {
        "normalizer": {
            **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
            **{"strip_accents": strips, "lowercase": lowercase},
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": around(file, pieces),
        "decoder": {"type": "WordPiece", "prefix": CONTINUES, "cleanup": True},
        "model": {
            **{"type": "WordPiece", "unk_token": pieces[unknown], "continuing_subword_prefix": CONTINUES},
            **{"max_input_chars_per_word": 100, "vocab": ids},
        },
    }


def unigram_parts(file: ConfigFile, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the parts of tokenizer.json for pieces with scores, of which the best ones are chosen."""
    pieces, scores = list(ids), scores_of(file, len(ids))
    normalizers: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}]
    if (table := file.fields.get("tokenizer.ggml.precompiled_charsmap")) is not None:
        if not isinstance(table, list) or len(table) > MOST_BYTES or set(map(type, table)) - {int}:
            raise file.error("tokenizer.ggml.precompiled_charsmap", f"at most {MOST_BYTES} bytes")
        text = base64.b64encode(bytes(byte & 255 for byte in table)).decode()
        normalizers.insert(0, {"type": "Precompiled", "precompiled_charsmap": text})
    mark = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, mark]},
        "post_processor": around(file, pieces, num_between=2),
        "decoder": mark,
        "model": {
            **{"type": "Unigram", "byte_fallback": False},
            "unk_id": file.size("tokenizer.ggml.unknown_token_id", 0, low=0, high=len(ids) - 1),
            "vocab": [[piece, float(score)] for piece, score in zip(pieces, scores, strict=True)],
        },
    }


def around(file: ConfigFile, pieces: Sequence[str], num_between: int = 1) -> dict[str, Any]:
    """Return the step that adds the first and the last token to a text, and `num_between` last ones in a pair."""
    first, last = _named(file, pieces, FIRST), _named(file, pieces, LAST)
    return template(pieces, [first, "A", last], [first, "A", *[last] * num_between, "B", last])


def template(pieces: Sequence[str], single: Sequence[int | str], pair: Sequence[int | str]) -> dict[str, Any]:
    """Return a step that adds tokens around a text "A", and around two."""

    def piece(each: int | str, type_id: int = 0) -> dict[str, Any]:
        if isinstance(each, str):
            return {"Sequence": {"id": each, "type_id": type_id}}
        return {"SpecialToken": {"id": pieces[each], "type_id": type_id}}

    special = {pieces[each]: each for each in (*single, *pair) if isinstance(each, int)}
    second = pair.index("B")
    return {
        "type": "TemplateProcessing",
        "single": [piece(each) for each in single],
        "pair": [piece(each, int(place >= second)) for place, each in enumerate(pair)],
        "special_tokens": {text: {"id": text, "ids": [each], "tokens": [text]} for text, each in special.items()},
    }


def _named(file: ConfigFile, pieces: Sequence[str], names: Sequence[str]) -> int:
    """Return the token that the file has under the first of these names that it has."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in names]
    key = next((each for each in keys if file.is_set(each)), keys[-1])
    return file.size(key, low=0, high=len(pieces) - 1)
