"""POST /v1/embeddings, and Cohere's /v2/embed: turn texts into vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.serve.context import RequestContext
from quire.serve.endpoints.line import Fields, admitted, fields_of
from quire.serve.loading.model_set import ModelSet
from quire.serve.render.answer import json_answer
from quire.serve.render.cohere import cohere_embed_answer
from quire.serve.render.embeddings import embedding_answer
from quire.serve.run.generation import Generation
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.cohere import CohereEmbedRequest
from quire.serve.schemas.embeddings import EmbeddingRequest
from quire.serve.services import Services
from quire.serve.sse import unless_gone
from quire.serve.translate.cohere import cohere_embed_request
from quire.serve.translate.embeddings import embedding_request

SHORT_ANSWER: Final = 64 << 10
"""Up to this many bytes of vectors, the event loop writes the answer itself, in a few milliseconds."""


async def answer_vectors(
    request: Request,
    kind: type[Fields],
    translate: Callable[[Fields, Services], GenerationRequest],
    render: Callable[[Fields, Generation, Sequence[bytes]], msgspec.Struct],
    note: Callable[[Request, Fields, Services], object] = lambda *_: None,
) -> Response:
    """Return the answer to a request for vectors; its work ends when the client leaves or its time is up.

    `note` is called before the model is loaded, for the request's other effects.
    """
    models: ModelSet = request.app.state.models
    context: RequestContext = request.state.context
    models.require_place(context.tenant)
    fields, services = await fields_of(request, kind)
    note(request, fields, services)

    async def work() -> Response:
        generation = await admitted(request, services, partial(translate, fields))
        vectors = await generation.vectors()

        def write() -> Response:
            return json_answer(render(fields, generation, vectors))

        if sum(map(len, vectors)) <= SHORT_ANSWER:
            return write()
        return await services.model.text_pool.run(context.tenant.name, write)

    return await unless_gone(request, work, services.config)


async def embeddings(request: Request) -> Response:
    """Answer as OpenAI does."""
    return await answer_vectors(request, EmbeddingRequest, embedding_request, embedding_answer)


async def cohere_embed(request: Request) -> Response:
    """Answer as Cohere does."""
    return await answer_vectors(request, CohereEmbedRequest, cohere_embed_request, cohere_embed_answer)
