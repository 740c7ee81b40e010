"""The endpoints: one function per path of the API, as routes of the application."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.engine.commands import OPERATOR_COMMANDS
from quire.serve.endpoints.adapters import load_adapter, unload_adapter
from quire.serve.endpoints.cache import CACHE_ROUTES
from quire.serve.endpoints.embeddings import cohere_embed, embeddings
from quire.serve.endpoints.live import live
from quire.serve.endpoints.llama_server import LLAMA_SERVER_ROUTES
from quire.serve.endpoints.messages import MESSAGES_ROUTES
from quire.serve.endpoints.ollama import OLLAMA_ROUTES
from quire.serve.endpoints.openai import chat_completions, completions, responses
from quire.serve.endpoints.operator import operator_command, restart_engines
from quire.serve.endpoints.scores import SCORE_ROUTES
from quire.serve.endpoints.tokens import detokenize, model, models, tokenize
from quire.serve.openapi import openapi_document


async def openapi(request: Request) -> Response:
    """Answer with the OpenAPI document."""
    return Response(openapi_document(), media_type="application/json")


ROUTES: Final = (
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/responses", responses, methods=["POST"]),
    Route("/v1/embeddings", embeddings, methods=["POST"]),
    Route("/v2/embed", cohere_embed, methods=["POST"]),
    Route("/v1/models", models, methods=["GET"]),
    Route("/v1/models/{model_id:path}", model, methods=["GET"]),  # model names contain slashes
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/v1/tokenize", tokenize, methods=["POST"]),
    Route("/v1/detokenize", detokenize, methods=["POST"]),
    Route("/v1/load_lora_adapter", load_adapter, methods=["POST"]),
    Route("/v1/unload_lora_adapter", unload_adapter, methods=["POST"]),
    *CACHE_ROUTES,
    *SCORE_ROUTES,
    *MESSAGES_ROUTES,
    *OLLAMA_ROUTES,
    *LLAMA_SERVER_ROUTES,
    Route("/live", live, methods=["GET"]),
    Route("/openapi.json", openapi, methods=["GET"]),
    Route("/restart_engines", restart_engines, methods=["POST"]),
    *(Route(f"/{name}", operator_command, methods=["POST"]) for name in OPERATOR_COMMANDS),
)
