"""Turns requests that score, rank or classify texts into `GenerationRequest`s that sample nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.core.errors import InvalidRequestError
from quire.core.pooling import LABELS, Pooling
from quire.core.validate import NO_LABELS
from quire.engine.text.scores import pair_prompts
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.scores import ClassifyRequest, CohereRerankRequest, Pairs, RerankRequest, ScoreRequest
from quire.serve.services import Services
from quire.serve.translate.completions import prompts_of
from quire.serve.translate.embeddings import WITHOUT_END, pooling_of, require_count, unsampled_request
from quire.serve.translate.sampling import truncation_to

NO_SCORES: Final = (
    "this server was started without --pooling and --score-tokens, and the model names neither, so it cannot score "
    "texts; start it with --pooling mean, or with --score-tokens yes,no for a model that was trained to answer so"
)


def score_request(fields: ScoreRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /score; raises if a field is not valid. Does not mutate."""
    return _with_common(_pairs_request(services, fields, fields.pairs(), "text_2"), fields)


def rerank_request(fields: RerankRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /rerank; raises if a field is not valid. Does not mutate."""
    pairs = [(fields.query, text) for text in fields.texts()]
    return _with_common(_pairs_request(services, fields, pairs, "documents"), fields)


def cohere_rerank_request(fields: CohereRerankRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /v2/rerank; raises if a field is not valid. Does not mutate.

    A conversation cannot be cut: its end asks for the score.
    """
    made, context = rerank_request(fields, services), services.model.limits.max_model_len
    if fields.max_tokens_per_doc is not None and fields.max_tokens_per_doc < context:
        allowed = f"{context} (the context) or more, or not set: a document is only cut to fit into the context"
        raise InvalidRequestError("max_tokens_per_doc", fields.max_tokens_per_doc, allowed)
    can_cut = made.chat is None or services.model.limits.one_step
    return replace(made, truncation=WITHOUT_END) if can_cut and made.truncation is None else made


def classify_request(fields: ClassifyRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /classify; raises if a field is not valid. Does not mutate."""
    if not services.model.report.labels:
        raise InvalidRequestError("input", "texts to classify", "texts to continue or to embed").saying(NO_LABELS)
    prompts = prompts_of(fields.input, "input")
    require_count(len(prompts), "input")
    made = unsampled_request(prompts, "input")
    special = fields.add_special_tokens is not False
    return _with_common(replace(made, pooling=Pooling(LABELS), add_special_tokens=special), fields)


def _pairs_request(
    services: Services, fields: ScoreRequest | RerankRequest, pairs: Pairs, place: str
) -> GenerationRequest:
    require_count(len(pairs), place)
    if any(not text for pair in pairs for text in pair):
        raise InvalidRequestError(place, "an empty text", "texts of at least one character")
    model = services.model
    if not model.report.labels:
        # Each text once: the query's vector serves all pairs.
        places: dict[str, str] = {}
        for index, pair in enumerate(pairs):
            for side, text in enumerate(pair):
                places.setdefault(text, fields.place(index, side))
        made = unsampled_request(list(places), place)
        names = {f"prompt[{index}]": name for index, name in enumerate(places.values())}
        return replace(made, pooling=pooling_of(services, 0, NO_SCORES), names={**made.names, **names})
    _require_room(services, pairs, fields.instruction, place)
    prompts, chat = pair_prompts(pairs, fields.instruction, model.tokenizer, plain=model.limits.one_step)
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
