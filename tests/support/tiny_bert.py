"""A tiny BERT with random weights, and a tokenizer of word pieces with the tokens of BERT around a text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from quire.compute.weights.checkpoint import Checkpoint
from support.spec_models import write_model_of
from support.tiny_checkpoint import write_model_weights

CONFIG: dict[str, object] = {
    "architectures": ["BertModel"],
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "dtype": "float32"},
    **{"num_attention_heads": 4, "max_position_embeddings": 96, "pad_token_id": 0},
}
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "block", "table", "page", "river", "##s", "##ing", "what")
TEXT = "what a block tables"
IDS = [2, 12, 5, 6, 7, 10, 3]
"""The tokens of `TEXT`."""

HEADS = {
    "Bert": ("bert.pooler.dense", "classifier"),
    "DistilBert": ("pre_classifier", "classifier"),
    "EuroBert": ("dense", "classifier"),
    "MPNet": ("classifier.dense", "classifier.out_proj"),
    "ModernBert": ("head.dense", "classifier"),
    "XLMRoberta": ("classifier.dense", "classifier.out_proj"),
}
"""The layer before the rows of labels, and these rows, by family."""


def write_tiny_reranker(folder: Path, labels: int = 1, family: str = "Bert", **settings: object) -> Path:
    """Write a tiny BERT, or another family of `HEADS`, with a classifier for texts, and return its folder."""
    names = {str(number): f"label {number}" for number in range(labels)}
    write_tiny_bert(folder, **{"architectures": [f"{family}ForSequenceClassification"], "id2label": names, **settings})
    checkpoint, random = Checkpoint.open(folder), np.random.default_rng(1)
    tensors = {name: np.array(checkpoint.tensor(name)) for name in checkpoint.entries}
    for name, shape in zip(HEADS[family], ((64, 64), (labels, 64)), strict=True):
        tensors[f"{name}.weight"] = random.standard_normal(shape, np.float32) / 4
        tensors[f"{name}.bias"] = random.standard_normal(shape[:1], np.float32)
    if family == "ModernBert":
        del tensors["head.dense.bias"]
        tensors["head.norm.weight"] = random.standard_normal(64, np.float32) / 4 + 1
    write_model_weights(folder, tensors)
    return folder


def write_tiny_bert(folder: Path, pooling: str = "mean_tokens", **settings: object) -> Path:
    """Write the model's folder and return it. `settings` replace fields of config.json."""
    write_model_of(folder, {**CONFIG, **settings})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    return folder


def tokenizer_json() -> dict[str, object]:
    """Return tokenizer.json as BERT has it: truncation and padding too, which quire does not use."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    pieces = {"type_id": 0}
    around = [{"SpecialToken": {"id": word, **pieces}} for word in ("[CLS]", "[SEP]")]
    text = {"Sequence": {"id": "A", **pieces}}
    return {
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0},
        "padding": None,
        "added_tokens": [{"id": index, "content": word, **special} for index, word in enumerate(WORDS[:5])],
        "normalizer": {
            **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
            **{"strip_accents": None, "lowercase": True},
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [around[0], text, around[1]],
            "pair": [
                *(around[0], text, around[1], {"Sequence": {"id": "B", "type_id": 1}}),
                {"SpecialToken": {"id": "[SEP]", "type_id": 1}},
            ],
            "special_tokens": {
                word: {"id": word, "ids": [WORDS.index(word)], "tokens": [word]} for word in ("[CLS]", "[SEP]")
            },
        },
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            **{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"},
            **{"max_input_chars_per_word": 100, "vocab": {word: index for index, word in enumerate(WORDS)}},
        },
    }
