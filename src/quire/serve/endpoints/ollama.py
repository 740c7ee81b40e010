"""Ollama's interface: /api/chat and /api/generate, which model there is, and what a server of one model refuses."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from quire.serve.endpoints.line import answer_text, fields_of
from quire.serve.errors import PERMISSION, ApiError
from quire.serve.render.answer import json_answer
from quire.serve.render.ollama import OllamaReply
from quire.serve.render.ollama_models import listed_models, loaded_models, shown_model
from quire.serve.schemas.ollama import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest, OllamaVersion
from quire.serve.services import Services
from quire.serve.sse import EventStream
from quire.serve.translate.ollama import ollama_chat_request, ollama_generate_request


async def ollama_chat(request: Request) -> Response | EventStream:
    """Answer a conversation."""
    return await answer_text(request, OllamaChatRequest, ollama_chat_request, OllamaReply)


async def ollama_generate(request: Request) -> Response | EventStream:
    """Answer a text, or continue it."""
    return await answer_text(request, OllamaGenerateRequest, ollama_generate_request, OllamaReply)


async def tags(request: Request) -> Response:
    """Answer with the model, by all its names."""
    return json_answer(listed_models(_ready(request)))


async def ps(request: Request) -> Response:
    """Answer with the model, which stays loaded."""
    return json_answer(loaded_models(_ready(request)))


async def show(request: Request) -> Response:
    """Answer with what there is to know of the model."""
    services = _ready(request)
    fields = await fields_of(request, OllamaShowRequest)
    return json_answer(shown_model(services, fields.model))


async def version(request: Request) -> Response:
    """Answer with the version of Ollama that a client may take this server for."""
    return json_answer(OllamaVersion())


async def running(request: Request) -> Response:
    """Answer as Ollama does: a server without a dashboard has nothing else at this path."""
    return PlainTextResponse("Ollama is running")


async def no_embeddings(request: Request) -> Response:
    """Refuse; no body is read."""
    raise ApiError(400, "this server makes no embeddings", code="unsupported")


async def no_changes(request: Request) -> Response:
    """Refuse to change what is stored; no body is read."""
    message = "this server neither fetches nor changes models; on its machine: quire models pull NAME"
    raise ApiError(403, message, type=PERMISSION, code="unsupported")


def _ready(request: Request) -> Services:
    services: Services = request.app.state.services
    services.gate.require_ready()
    return services


OLLAMA_ROUTES: Final = (
    Route("/api/chat", ollama_chat, methods=["POST"]),
    Route("/api/generate", ollama_generate, methods=["POST"]),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/version", version, methods=["GET"]),
    Route("/api/embed", no_embeddings, methods=["POST"]),
    Route("/api/embeddings", no_embeddings, methods=["POST"]),
    *(Route(f"/api/{name}", no_changes, methods=["POST"]) for name in ("copy", "create", "pull", "push")),
    Route("/api/delete", no_changes, methods=["DELETE"]),
    Route("/api/blobs/{digest}", no_changes, methods=["HEAD", "POST"]),
    Route("/", running, methods=["GET"]),
)
