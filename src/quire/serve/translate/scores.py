"""Turns requests that score, rank or classify texts into `GenerationRequest`s that sample nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.core.errors import InvalidRequestError
from quire.core.pooling import LABELS, Pooling
from quire.core.validate import NO_LABELS
from quire.engine.text.scores import pair_prompts
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.scores import ClassifyRequest, Pairs, RerankRequest, ScoreRequest
from quire.serve.services import Services
from quire.serve.translate.completions import prompts_of
from quire.serve.translate.embeddings import pooling_of, require_count, unsampled_request
from quire.serve.translate.sampling import truncation_to

NO_SCORES: Final = (
    "this server was started without --pooling and --score-tokens, and the model names neither, so it cannot score "
    "texts; start it with --pooling mean, or with --score-tokens yes,no for a model that was trained to answer so"
)


def score_request(fields: ScoreRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /score; raises if a field is not valid. Does not mutate."""
    made = _pairs_request(services, fields.pairs(), fields.instruction, "text_2")
    return _with_common(made, fields)


def rerank_request(fields: RerankRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /rerank; raises if a field is not valid. Does not mutate."""
    pairs = [(fields.query, text) for text in fields.texts()]
    return _with_common(_pairs_request(services, pairs, fields.instruction, "documents"), fields)


def classify_request(fields: ClassifyRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /classify; raises if a field is not valid. Does not mutate."""
    if not services.model.report.labels:
        raise InvalidRequestError("input", "texts to classify", "texts to continue or to embed").saying(NO_LABELS)
    prompts = prompts_of(fields.input, "input")
    require_count(len(prompts), "input")
    made = unsampled_request(prompts, "input")
    special = fields.add_special_tokens is not False
    return _with_common(replace(made, pooling=Pooling(LABELS), add_special_tokens=special), fields)


def _pairs_request(services: Services, pairs: Pairs, instruction: str | None, place: str) -> GenerationRequest:
    require_count(len(pairs), place)
    if any(not text for pair in pairs for text in pair):
        raise InvalidRequestError(place, "an empty text", "texts of at least one character")
    model = services.model
    if not model.report.labels:
        # Each text once: the query's vector serves all pairs.
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        return replace(unsampled_request(texts, place), pooling=pooling_of(services, 0, NO_SCORES))
    _require_room(services, pairs, instruction, place)
    prompts, chat = pair_prompts(pairs, instruction, model.tokenizer, plain=model.limits.one_step)
    return replace(unsampled_request(prompts, place), pooling=Pooling(LABELS), chat=chat)


def _require_room(services: Services, pairs: Pairs, instruction: str | None, place: str) -> None:
    """Raise if the prompts of all pairs, which each repeat the query, are longer than a body may be."""
    num_characters = sum(len(text) for pair in pairs for text in pair) + len(pairs) * len(instruction or "")
    most = services.config.max_body_bytes
    if num_characters > most:
        found = f"{num_characters:,} characters, with the query for each"
        raise InvalidRequestError(place, found, f"at most {most:,}, the max_body: fewer texts, or a shorter query")


def _with_common(made: GenerationRequest, fields: ScoreRequest | RerankRequest | ClassifyRequest) -> GenerationRequest:
    cut = truncation_to(fields.truncate_prompt_tokens)
    return replace(made, truncation=cut, cache_salt=fields.cache_salt, priority=fields.priority)
