"""Turns requests for vectors into `GenerationRequest`s that sample nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from quire.core.errors import InvalidRequestError
from quire.core.pooling import Pooling
from quire.engine.door import FOR_VECTORS
from quire.engine.text.prompts import Prompt
from quire.serve.errors import ApiError
from quire.serve.run.request import GenerationRequest, Truncation
from quire.serve.schemas.embeddings import MAX_INPUTS, EmbeddingRequest, OllamaEmbeddingsRequest, OllamaEmbedRequest
from quire.serve.services import Services
from quire.serve.translate.completions import prompts_of
from quire.serve.translate.sampling import truncation_to

NO_POOLING: Final = (
    "this server was started without --pooling, and the model names none, so it makes no vectors; start it with "
    "--pooling mean or --pooling last"
)
WITHOUT_END: Final = Truncation(None, keeps_start=True)
"""Cut off the end of a too long text."""


def embedding_request(fields: EmbeddingRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /v1/embeddings; raises if a field is not valid. Does not mutate."""
    cut = truncation_to(fields.truncate_prompt_tokens)
    made = vector_request(services, prompts_of(fields.input, "input"), "input", fields.dimensions, cut)
    special = fields.add_special_tokens is not False
    return replace(made, add_special_tokens=special, cache_salt=fields.cache_salt, priority=fields.priority)


def require_count(count: int, place: str) -> None:
    """Raise unless one request may have this many texts."""
    if not 1 <= count <= MAX_INPUTS:
        raise InvalidRequestError(place, f"{count} texts", f"1 to {MAX_INPUTS} texts")


def ollama_embed_request(fields: OllamaEmbedRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /api/embed; raises if a field is not valid. Does not mutate."""
    texts = [fields.input] if isinstance(fields.input, str) else fields.input
    cut = None if fields.truncate is False else WITHOUT_END
    return vector_request(services, texts, "input", fields.dimensions, cut)


def ollama_embeddings_request(fields: OllamaEmbeddingsRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /api/embeddings; raises if a field is not valid. Does not mutate."""
    return vector_request(services, [fields.prompt], "prompt", None, WITHOUT_END)


def vector_request(
    services: Services,
    prompts: Sequence[str | list[int]],
    place: str,
    dimensions: int | None,
    truncation: Truncation | None,
) -> GenerationRequest:
    """Return a request that makes a vector of each prompt; `place`: the name of their field. Does not mutate."""
    require_count(len(prompts), place)
    pooling = pooling_of(services, dimensions or 0, NO_POOLING)
    return replace(unsampled_request(prompts, place), truncation=truncation, pooling=pooling)


def unsampled_request(prompts: Sequence[Prompt], place: str) -> GenerationRequest:
    """Return a request that samples nothing; `place`: the name of the prompts' field. Does not mutate."""
    return GenerationRequest(prompts, FOR_VECTORS, {"prompt": place})


def pooling_of(services: Services, dimensions: int, otherwise: str) -> Pooling:
    """Return how to pool vectors; raises `ApiError`, saying `otherwise`, if nothing specifies it."""
    try:
        return services.model.pooling_for(None, dimensions)
    except InvalidRequestError:  # none of the client's fields is at fault
        raise ApiError(400, otherwise, code="invalid_value") from None
