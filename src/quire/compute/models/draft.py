"""Pairs a model with its draft model, and explains why two models do not fit together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quire.compute.models import ModelDescription
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.errors import InvalidConfigError


def with_draft(model: ModelDescription, draft: ModelDescription, name: str) -> ModelDescription:
    """Return a model with its draft model; raises `InvalidConfigError` if they do not fit together. Pure."""
    size, draft_size = (weight_bytes(each.spec, "float32") for each in (model, draft))
    if draft_size > size:
        raise InvalidConfigError("speculation", name, "a draft model that is smaller than the model")
    if any(layer.window is not None for each in (model, draft) for layer in each.spec.layers):
        which = "the model" if any(layer.window is not None for layer in model.spec.layers) else name
        allowed = f"auto, ngram or off, or another pair: {which} has layers with a sliding window"
        raise InvalidConfigError("speculation", name, allowed)
    notices = [f"the draft model {name} is as large as the model: its guesses take as long"] * (draft_size == size)
    length, most = draft.spec.context_length, model.spec.context_length
    if length < most:
        notices.append(f"the draft model {name} reads {length:,} of {most:,} tokens: it guesses nothing beyond")
    return replace(model, draft=draft, notices=model.notices + tuple(notices))


def require_same_tokens(name: str, tokenizer: Mapping[str, Any], draft: Mapping[str, Any], vocab_size: int) -> None:
    """Raise `InvalidConfigError` unless two tokenizers (in the form of tokenizer.json) have the same tokens. Pure.

    `vocab_size`: the number of ids that both models have; higher ids are never generated.
    """
    ours, theirs = tokens_of(tokenizer), tokens_of(draft)
    for token_id in range(vocab_size):
        one, other = ours.get(token_id), theirs.get(token_id)
        if one != other:
            differs = f"token {token_id} is {one!r:.40} in the model and {other!r:.40} in the draft model"
            raise InvalidConfigError("speculation", name, f"a model with the same tokenizer; {differs}")


def tokens_of(tokenizer: Mapping[str, Any]) -> dict[int, str]:
    """Return the tokens of a tokenizer by id.

    >>> tokens_of({"model": {"vocab": {"a": 1, "b": 0}}, "added_tokens": [{"id": 2, "content": "<end>"}]})
    {1: 'a', 0: 'b', 2: '<end>'}
    """
    vocab = tokenizer["model"]["vocab"]
    if isinstance(vocab, Mapping):
        found = {token_id: token for token, token_id in vocab.items()}
    else:  # pieces with their scores
        found = {token_id: piece[0] for token_id, piece in enumerate(vocab)}
    return found | {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
