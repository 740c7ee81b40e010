"""The answers with vectors."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from quire.core.pooling import vector_numbers
from quire.serve.render.answer import shown_model
from quire.serve.run.generation import Generation
from quire.serve.schemas.common import PromptTokensDetails
from quire.serve.schemas.embeddings import (
    Embedding,
    EmbeddingAnswer,
    EmbeddingRequest,
    EmbeddingUsage,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)


def embedding_answer(fields: EmbeddingRequest, generation: Generation, vectors: Sequence[bytes]) -> EmbeddingAnswer:
    """Return the answer of /v1/embeddings. Does not mutate."""
    counts, is_base64 = generation.counts, fields.encoding_format == "base64"
    data = [
        Embedding(
            "embedding", index, base64.b64encode(vector).decode() if is_base64 else vector_numbers(vector).tolist()
        )
        for index, vector in enumerate(vectors)
    ]
    usage = EmbeddingUsage(counts.prompt, counts.prompt, PromptTokensDetails(counts.cached))
    return EmbeddingAnswer("list", shown_model(fields, generation), data, usage)


def ollama_embed_answer(
    fields: OllamaEmbedRequest, generation: Generation, vectors: Sequence[bytes]
) -> OllamaEmbedAnswer:
    """Return the answer of /api/embed. Does not mutate."""
    context, now = generation.context, generation.services.clock.now()
    return OllamaEmbedAnswer(
        model=shown_model(fields, generation),
        embeddings=[vector_numbers(vector).tolist() for vector in vectors],
        total_duration=round((now - context.arrival_s) * 1e9),
        load_duration=0,
        prompt_eval_count=generation.counts.prompt,
    )


def ollama_embeddings_answer(
    _: OllamaEmbeddingsRequest, generation: Generation, vectors: Sequence[bytes]
) -> OllamaEmbeddingsAnswer:
    """Return the answer of /api/embeddings. Does not mutate."""
    return OllamaEmbeddingsAnswer(vector_numbers(vectors[0]).tolist())
