"""llama-server's own API, OpenAI's paths without /v1, and refusals that name an alternative."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.serve.endpoints.line import answer_text
from quire.serve.endpoints.openai import chat_completions
from quire.serve.endpoints.tokens import models as list_models
from quire.serve.errors import ApiError
from quire.serve.loading.model_set import ModelSet, names_for
from quire.serve.render.answer import json_answer
from quire.serve.render.llama_server import LlamaReply, llama_props
from quire.serve.schemas.llama_server import LlamaCompletionRequest, LlamaInfillRequest
from quire.serve.sse import EventStream
from quire.serve.translate.llama_server import llama_completion_request, llama_infill_request

ELSEWHERE: Final = {
    "/slots": "there are no slots: requests share one KV memory; GET /live shows them, GET /load counts them",
    "/slots/{slot}": "there are no slots to save: the prefix cache keeps shared prefixes",
    **dict.fromkeys(("/embedding", "/embeddings"), "send the texts to POST /v1/embeddings"),
    **dict.fromkeys(
        ("/generate", "/generate_stream"), "send the prompt to POST /v1/completions, /completion or /api/generate"
    ),
    "/lora-adapters": "adapters are served as models: GET /v1/models lists them",
    "/apply-template": "POST /tokenize with messages returns the token ids of a conversation",
}
"""Paths of llama-server, vLLM and text-generation-inference, and what to do instead."""


async def completion(request: Request) -> Response | EventStream:
    """Answer a request."""
    return await answer_text(request, LlamaCompletionRequest, llama_completion_request, LlamaReply)


async def infill(request: Request) -> Response | EventStream:
    """Answer a request for the text between a prefix and a suffix."""
    return await answer_text(request, LlamaInfillRequest, llama_infill_request, LlamaReply)


async def props(request: Request) -> Response:
    """Answer with the properties of the server."""
    models: ModelSet = request.app.state.models
    tenant = request.state.context.tenant
    services = models.find(request.query_params.get("model"), tenant)
    services.gate.require_ready()
    return json_answer(llama_props(services, next(iter(names_for(services, tenant)), "")))


async def elsewhere(request: Request) -> Response:
    """Refuse, and name the alternative; reads no body."""
    raise ApiError(501, ELSEWHERE[request.scope["route"].path], code="unsupported")


LLAMA_SERVER_ROUTES: Final = (
    Route("/completion", completion, methods=["POST"]),
    Route("/completions", completion, methods=["POST"]),
    Route("/chat/completions", chat_completions, methods=["POST"]),
    Route("/models", list_models, methods=["GET"]),
    Route("/infill", infill, methods=["POST"]),
    Route("/props", props, methods=["GET"]),
    *(Route(path, elsewhere, methods=["GET", "POST"]) for path in ELSEWHERE),
)
