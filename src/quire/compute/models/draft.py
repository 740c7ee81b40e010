"""Pairs a model with its draft model, and explains why two models do not fit together."""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from quire.compute.models import ModelDescription
from quire.compute.models.guess_layer import guess_layer, guess_layer_stem, guesses_should_pay
from quire.compute.models.source import ModelSource
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.config import AUTO, MTP, EngineConfig
from quire.core.errors import CheckpointError, InvalidConfigError


def with_draft(model: ModelDescription, draft: ModelDescription, name: str) -> ModelDescription:
    """Return a model with its draft model; raises `InvalidConfigError` if they do not fit together. Pure."""
    size, draft_size = (weight_bytes(each.spec, "float32") for each in (model, draft))
    if draft_size > size:
        raise InvalidConfigError("speculation", name, "a draft model that is smaller than the model")
    if model.spec.recurrence is not None or draft.spec.recurrence is not None:
        which = "the model" if model.spec.recurrence is not None else name
        allowed = f"auto, ngram, mtp or off, or another pair: {which} has recurrent layers"
        raise InvalidConfigError("speculation", name, allowed)
    if any(layer.window is not None for each in (model, draft) for layer in each.spec.layers):
        which = "the model" if any(layer.window is not None for layer in model.spec.layers) else name
        allowed = f"auto, ngram or off, or another pair: {which} has layers with a sliding window"
        raise InvalidConfigError("speculation", name, allowed)
    notices = [f"the draft model {name} is as large as the model: its guesses take as long"] * (draft_size == size)
    length, most = draft.spec.context_length, model.spec.context_length
    if length < most:
        notices.append(f"the draft model {name} reads {length:,} of {most:,} tokens: it guesses nothing beyond")
    return replace(model, draft=draft, notices=model.notices + tuple(notices))


def with_own_layer(model: ModelDescription, names: Container[str] | None = None) -> ModelDescription:
    """Return a model that guesses with its own layer; raises `InvalidConfigError` if it has none. Pure.

    `names`: those of the tensors of its checkpoint; None: unknown.
    """
    if not model.spec.guess_sources:
        allowed = f"off, auto, ngram, or a draft model: quire knows no guessing layer of {model.architecture}"
        raise InvalidConfigError("speculation", MTP, allowed)
    name = f"{guess_layer_stem(model.spec)}.weight"
    if names is not None and name not in names and name.removeprefix(model.spec.optional_prefix) not in names:
        allowed = f"off, auto, ngram, or a draft model: this checkpoint lacks the guessing layer ({name})"
        raise InvalidConfigError("speculation", MTP, allowed)
    return replace(model, draft=replace(model, spec=guess_layer(model.spec), vision=None))


def with_auto_layer(config: EngineConfig, model: ModelDescription, source: ModelSource) -> EngineConfig:
    """Return settings with mtp instead of auto, if the checkpoint has a layer that should pay. Does not mutate.

    Reads the headers of the checkpoint, if it is there.
    """
    can_guess = config.speculation == AUTO and config.tensor_parallel == 1 and bool(model.spec.guess_sources)
    if can_guess and guesses_should_pay(model.spec):
        with suppress(CheckpointError, InvalidConfigError):  # settings without tensors, or tensors without the layer
            with_own_layer(model, source.tensors().entries)
            return replace(config, speculation=MTP)
    return config


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
