"""The vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from quire.compute.models.config_file import ConfigFile

CONTROL: Final = 3  # of tokenizer.ggml.token_type
NO_TOKEN: Final = (1 << 32) - 1
"""-1 as files have it for a token that a vocabulary lacks, such as the one for padding."""


def vocabulary(file: ConfigFile) -> tuple[Sequence[str], Sequence[Any]]:
    """Return the tokens of a file by id, and the type of each."""
    tokens = file.texts("tokenizer.ggml.tokens")
    kinds = file.fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise file.error("tokenizer.ggml.token_type", f"a list of {len(tokens)} types, one for each token")
    return tokens, kinds


def scores_of(file: ConfigFile, count: int) -> Sequence[float]:
    """Return the scores of `count` tokens."""
    scores = file.fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != count or not {int, float}.issuperset(map(type, scores)):
        raise file.error("tokenizer.ggml.scores", f"a list of {count} numbers, one for each token")
    return scores
