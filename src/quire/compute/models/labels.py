"""The labels of a model that classifies texts: their names, and how their scores become probabilities.

...ForSequenceClassification    a row of `score.weight` for each label, on the state of the last token
of an encoder                   two layers, on the state of the first token or the mean of all (heads.py)
two tokens of any model         their rows of the head: Qwen3-Reranker answers yes or no
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from quire.compute.models.config_file import ConfigFile
from quire.compute.models.heads import HeadSpec
from quire.core.errors import CheckpointError, InvalidConfigError

CLASSIFIES: Final = "ForSequenceClassification"
WITHOUT_LABELS: Final = ("ForCausalLM", "LMHeadModel", "Model")
"""What the names of families have in the place of `CLASSIFIES`."""

MASKED: Final = "ForMaskedLM"
"""The end of the name of an encoder whose folder may have a head for masked tokens, which is not used."""

SCORE_TENSOR: Final = "score.weight"
MAX_LABELS: Final = 10_000
NUM_LABELS: Final = 2
"""The number of labels if config.json does not specify it."""


@dataclass(frozen=True, slots=True)
class Labels:
    """The labels of a model. `is_one_of`: exactly one applies (softmax); otherwise each applies or not (sigmoid).

    `token_ids`: the rows of the head that score them; empty: the rows of `score.weight` do, or those of the `head` of
    an encoder.
    """

    names: tuple[str, ...]
    is_one_of: bool
    token_ids: tuple[int, ...] = ()
    head: HeadSpec | None = None


def labels_of(config: ConfigFile, head: HeadSpec | None) -> Labels:
    """Return the labels in the settings of a ...ForSequenceClassification; raises `CheckpointError`.

    `head`: that of an encoder.
    """
    section = config.section("id2label")
    count = len(section.fields) or config.size("num_labels", NUM_LABELS, high=MAX_LABELS)
    if count > MAX_LABELS:
        raise config.error("id2label", f"at most {MAX_LABELS} labels")
    names = [section.fields.get(str(index), f"LABEL_{index}") for index in range(count)]
    if not all(isinstance(name, str) for name in names):
        raise config.error("id2label", "a text for each label")
    config.require("problem_type", "single_label_classification", "multi_label_classification", None)
    is_one_of = count > 1 and config.fields.get("problem_type") != "multi_label_classification"
    return Labels(tuple(map(str, names)), is_one_of, head=head)


def labels_of_tokens(score_tokens: str, tokenizer: Mapping[str, Any]) -> Labels:
    """Return the labels of two tokens, such as "yes,no", by their texts in a tokenizer; raises `InvalidConfigError`."""
    texts = score_tokens.split(",")
    vocab = tokenizer["model"]["vocab"]
    if not isinstance(vocab, Mapping):  # pieces with their scores
        vocab = {piece[0]: index for index, piece in enumerate(vocab)}
    vocab = dict(vocab) | {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    if len(texts) != NUM_LABELS or texts[0] == texts[1] or any(text not in vocab for text in texts):
        raise InvalidConfigError("score_tokens", score_tokens, "two tokens of the model, such as yes,no")
    return Labels(tuple(texts), True, tuple(int(vocab[text]) for text in texts))


def separator_of(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the token after which a tokenizer's second text begins, if that is of another type than the first."""
    step = tokenizer.get("post_processor") or {}
    if step.get("type") == "BertProcessing":
        return int(step["sep"][1])
    if step.get("type") != "TemplateProcessing":
        return None
    places = [next(iter(piece.items())) for piece in step["pair"]]
    for (kind, before), (_, piece) in pairwise(places):
        if piece.get("type_id") == 1 and piece["id"] == "B" and kind == "SpecialToken":
            return int(step["special_tokens"][before["id"]]["ids"][-1])
    return None


def require_width(where: str, width: int, hidden_size: int) -> None:
    """Raise unless the rows that score labels are as wide as hidden states."""
    if width != hidden_size:
        raise CheckpointError(f"{where}: row", width, f"{hidden_size} numbers, those of a hidden state")
