"""Ollama's API: /api/chat and /api/generate, the lists of models, and refusals of changes to models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.core.errors import QuireError, TooManyJobsError
from quire.engine.records.stats import ModelState
from quire.serve.endpoints.embeddings import answer_vectors
from quire.serve.endpoints.line import answer_text, fields_of, require_ready
from quire.serve.errors import ApiError, model_not_loadable
from quire.serve.loading.model_set import ModelSet
from quire.serve.model import ServedModel
from quire.serve.render.answer import json_answer
from quire.serve.render.embeddings import ollama_embed_answer, ollama_embeddings_answer
from quire.serve.render.ollama import OllamaReply
from quire.serve.render.ollama_models import listed_models, loaded_models, shown_model, unloaded_model
from quire.serve.schemas.embeddings import OllamaEmbeddingsRequest, OllamaEmbedRequest
from quire.serve.schemas.ollama import (
    KeptFields,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaShowRequest,
    OllamaVersion,
)
from quire.serve.services import Services
from quire.serve.sse import EventStream
from quire.serve.translate.embeddings import ollama_embed_request, ollama_embeddings_request
from quire.serve.translate.ollama import (
    asks_nothing,
    ollama_chat_request,
    ollama_generate_request,
    wanted_keep_alive_s,
)


async def ollama_chat(request: Request) -> Response | EventStream:
    """Answer a conversation."""
    return await answer_text(request, OllamaChatRequest, ollama_chat_request, OllamaReply, _kept)


async def ollama_generate(request: Request) -> Response | EventStream:
    """Answer a text, or continue it."""
    return await answer_text(request, OllamaGenerateRequest, ollama_generate_request, OllamaReply, _kept)


async def ollama_embed(request: Request) -> Response:
    """Answer with vectors of texts."""
    return await answer_vectors(request, OllamaEmbedRequest, ollama_embed_request, ollama_embed_answer, _kept)


async def ollama_embeddings(request: Request) -> Response:
    """Answer with the vector of a text, as Ollama did before it had /api/embed."""
    return await answer_vectors(
        request, OllamaEmbeddingsRequest, ollama_embeddings_request, ollama_embeddings_answer, _kept
    )


def _kept(request: Request, fields: KeptFields, services: Services) -> Response | None:
    """Apply a request's keep_alive; return the answer to a request that only unloads its model, else None. Mutates."""
    models: ModelSet = request.app.state.models
    seconds, tenant = wanted_keep_alive_s(fields), request.state.context.tenant
    if seconds is None or not models.may_keep(tenant):
        return None
    if seconds == 0 and isinstance(fields, OllamaFields) and asks_nothing(fields):
        models.unload_when_idle(services)
        return json_answer(unloaded_model(fields, services))
    models.keep(services, seconds)
    return None


async def tags(request: Request) -> Response:
    """Answer with all models, under all their names."""
    return json_answer(listed_models(require_ready(request).models, request.state.context.tenant))


async def ps(request: Request) -> Response:
    """Answer with the loaded models, and for how long they stay."""
    return json_answer(loaded_models(require_ready(request), request.state.context.tenant))


async def show(request: Request) -> Response:
    """Answer with the details of a model, without loading it."""
    require_ready(request)
    fields, services = await fields_of(request, OllamaShowRequest)
    async with _readable(services, request.state.context.tenant.name) as model:
        return json_answer(shown_model(services, model, fields.model))


async def version(request: Request) -> Response:
    """Answer with the version of Ollama whose API this server has."""
    return json_answer(OllamaVersion())


async def running(request: Request) -> Response:
    """Answer as Ollama does; a server with a dashboard has that at this path."""
    return PlainTextResponse("Ollama is running")


async def no_changes(request: Request) -> Response:
    """Refuse to change stored models; reads no body."""
    message = "this server does not download or change models; run quire models pull NAME on its machine"
    raise ApiError(403, message, code="unsupported")


@asynccontextmanager
async def _readable(services: Services, tenant: str) -> AsyncIterator[ServedModel]:
    """Return a model with its tokenizer, possibly without an engine."""
    if services.model.state is not ModelState.UNLOADED:
        yield services.model
        return
    try:
        model = await services.model.opened(tenant)
    except TooManyJobsError:
        raise
    except QuireError as error:
        raise model_not_loadable(services.name, str(error)) from error
    try:
        yield model
    finally:
        await model.close()


OLLAMA_ROUTES: Final = (
    Route("/api/chat", ollama_chat, methods=["POST"]),
    Route("/api/generate", ollama_generate, methods=["POST"]),
    Route("/api/embed", ollama_embed, methods=["POST"]),
    Route("/api/embeddings", ollama_embeddings, methods=["POST"]),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version, methods=["GET"]),
    *(Route(f"/api/{name}", no_changes, methods=["POST"]) for name in ("copy", "create", "pull", "push")),
    Route("/api/delete", no_changes, methods=["DELETE"]),
    Route("/api/blobs/{digest}", no_changes, methods=["HEAD", "POST"]),
    Route("/", running, methods=["GET"]),
)
