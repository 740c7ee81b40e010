"""Turns Cohere's requests for vectors into `GenerationRequest`s that sample nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.core.errors import InvalidRequestError
from quire.serve.run.request import GenerationRequest, Truncation
from quire.serve.schemas.cohere import CohereEmbedRequest
from quire.serve.services import Services
from quire.serve.translate.embeddings import vector_request

PACKED: Final = ("binary", "ubinary")
BITS_PER_BYTE: Final = 8


def cohere_embed_request(fields: CohereEmbedRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a request of /v2/embed; raises if a field is not valid. Does not mutate."""
    place, size = fields.place, services.model.limits.vector_size
    made = vector_request(services, fields.all_texts(), place, fields.output_dimension, _truncation(fields, services))
    _require_bytes(fields, fields.output_dimension or size)
    names = {**made.names, "dimensions": "output_dimension"}
    return replace(made, names=names, cache_salt=fields.cache_salt, priority=fields.priority)


def _truncation(fields: CohereEmbedRequest, services: Services) -> Truncation | None:
    """Return how to cut or refuse a text that is too long for the model, or for `max_tokens`."""
    most = fields.max_tokens
    if most is not None and most >= services.model.limits.max_model_len:
        most = None
    if fields.truncate == "NONE":
        return None if most is None else Truncation(most, keeps_start=False, refuses=True)
    return Truncation(most, keeps_start=fields.truncate != "START")


def _require_bytes(fields: CohereEmbedRequest, size: int) -> None:
    """Raise if the requested bits do not fill whole bytes."""
    for index, each in enumerate(fields.embedding_types or ()):
        if each in PACKED and size % BITS_PER_BYTE:
            allowed = f"another type, or an output_dimension that is a multiple of 8: the vectors have {size} numbers"
            raise InvalidRequestError(f"embedding_types[{index}]", each, allowed)
