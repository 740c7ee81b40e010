"""The OpenAPI document, generated from the structs of requests and answers.

Written by hand are the paths, and what a struct cannot express: `FORMS`, fields that are accepted and ignored, and
fields that are refused unless they have no effect. It leaves out ranges that depend on the model (token ids, context
length); a value outside them is still answered with 400.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Final

import msgspec

import quire
from quire.engine.commands import OPERATOR_COMMANDS
from quire.serve.errors import ErrorBody, OllamaErrorBody
from quire.serve.messages_errors import MESSAGES_PATH, MessagesErrorBody, takes_x_api_key
from quire.serve.schemas.adapters import AdapterAnswer, LoadAdapterRequest, UnloadAdapterRequest
from quire.serve.schemas.cache import CacheExportRequest, CacheImportAnswer, CacheWarmAnswer, CacheWarmRequest
from quire.serve.schemas.chat import ChatCompletion, ChatCompletionChunk, ChatRequest
from quire.serve.schemas.cohere import CohereEmbedAnswer, CohereEmbedRequest
from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.completions import Completion, CompletionRequest
from quire.serve.schemas.embeddings import (
    EmbeddingAnswer,
    EmbeddingRequest,
    OllamaEmbedAnswer,
    OllamaEmbeddingsAnswer,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
)
from quire.serve.schemas.fields import IGNORED, REFUSED
from quire.serve.schemas.forms import FORMS, JSON_TEXT, OBJECT, STRING, Schema, any_of, object_of
from quire.serve.schemas.llama_server import LlamaCompletion, LlamaCompletionRequest, LlamaInfillRequest, LlamaProps
from quire.serve.schemas.messages import CountTokensRequest, MessageAnswer, MessagesRequest, TokensCounted
from quire.serve.schemas.ollama import (
    ListedModels,
    LoadedModels,
    OllamaChatAnswer,
    OllamaChatRequest,
    OllamaGenerateAnswer,
    OllamaGenerateRequest,
    OllamaShowRequest,
    OllamaVersion,
    ShownModel,
)
from quire.serve.schemas.responses import ResponseAnswer, ResponseRequest
from quire.serve.schemas.scores import (
    CLASSIFY_PATHS,
    COHERE_PATHS,
    RERANK_PATHS,
    SCORE_PATHS,
    ClassifyAnswer,
    ClassifyRequest,
    CohereRerankAnswer,
    CohereRerankRequest,
    RerankAnswer,
    RerankRequest,
    ScoreAnswer,
    ScoreRequest,
)
from quire.serve.schemas.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeAnswer,
    TokenizeRequest,
)

OPEN: Final = {
    "/livez": "Check that the process is alive.",
    "/readyz": "Check that the server admits requests.",
    "/health": "The same as /readyz.",
    "/ping": "The same as /readyz.",
    "/version": "The version of the server.",
}

ANY_JSON: Final[Schema] = {"application/json": {"schema": OBJECT}}


@cache
def openapi_document() -> bytes:
    """Return the document, as JSON. Does not mutate."""
    kinds: dict[type, None] = {}

    def refer(kind: type) -> Schema:
        kinds[kind] = None
        return {"$ref": f"#/components/schemas/{kind.__name__}"}

    paths = msgspec.json.encode(_paths(), enc_hook=refer)
    return msgspec.json.encode(
        {
            "openapi": "3.2.0",  # the first version with event streams
            "info": {
                "title": "quire",
                "version": quire.__version__,
                "description": "APIs that are compatible with OpenAI, Anthropic and Ollama, and quire's extensions.",
            },
            "paths": msgspec.Raw(paths),
            "components": {
                "schemas": _schemas(kinds),
                "securitySchemes": {
                    "key": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{}, {"key": []}],
        }
    )


def _schemas(kinds: Collection[type]) -> Schema:
    _, found = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in filter(lambda each: issubclass(each, ModelFields), kinds):
        properties = found[kind.__name__]["properties"]
        for name in sorted(IGNORED - properties.keys()):
            properties[name] = {"description": "Accepted, and ignored."}
        for name, refusal in REFUSED.items():
            if name not in properties:
                properties[name] = {"enum": [None, *refusal.nothing], "description": f"Refused: {refusal.why}."}
    for request, form in FORMS.items():
        found[request]["properties"] |= form
    return found


def _paths() -> Schema:
    """Return the paths; a struct stands for a reference to its schema."""
    paths: Schema = {
        "/v1/completions": _post("Continue prompts.", CompletionRequest, Completion, _chunks(Completion)),
        "/v1/chat/completions": _post(
            "Answer a conversation.", ChatRequest, ChatCompletion, _chunks(ChatCompletionChunk)
        ),
        "/v1/responses": _post(
            "Answer a text or a conversation (Responses API).", ResponseRequest, ResponseAnswer, _event(JSON_TEXT)
        ),
        "/v1/embeddings": _post("Make vectors of texts.", EmbeddingRequest, EmbeddingAnswer),
        "/v2/embed": _post("Make vectors of texts, as Cohere does.", CohereEmbedRequest, CohereEmbedAnswer),
        "/v1/models": _get("List the served models.", _json(ModelList)),
        "/v1/models/{model_id}": _get("Describe a served model.", _json(ModelCard))
        | {"parameters": [{"name": "model_id", "in": "path", "required": True, "schema": STRING}]},
        "/completion": _post(
            "Continue a prompt (llama-server).", LlamaCompletionRequest, LlamaCompletion, _event(JSON_TEXT)
        ),
        "/infill": _post(
            "Write the text between a prefix and a suffix (llama-server).",
            *(LlamaInfillRequest, LlamaCompletion, _event(JSON_TEXT)),
        ),
        "/props": _get("Describe the server (llama-server).", _json(LlamaProps)),
        "/live": _get(
            "Stream events of the KV memory of a model (?model=NAME; the first) until the client disconnects.",
            {"application/x-ndjson": {"itemSchema": object_of({"type": {"enum": ["hello", "frame"]}})}},
        ),
        "/openapi.json": _get("This document.", ANY_JSON),
        "/load": _get("Load of the server.", ANY_JSON),
        "/metrics": _get("Metrics in Prometheus format, for operators.", {"text/plain": {"schema": STRING}}),
    }
    for prefix in ("", "/v1"):
        paths[f"{prefix}/tokenize"] = _post("The token ids of a text.", TokenizeRequest, TokenizeAnswer)
        paths[f"{prefix}/detokenize"] = _post("The text of token ids.", DetokenizeRequest, DetokenizeAnswer)
    done = _answers(ANY_JSON)
    for name, command in OPERATOR_COMMANDS.items():
        paths[f"/{name}"] = {"post": {"summary": f"{type(command).__doc__} For operators.", "responses": done}}
    summary = "Restart the engines, one after another, while requests go on; answers when all are back. For operators."
    paths["/restart_engines"] = {"post": {"summary": summary, "responses": done}}
    for path in SCORE_PATHS:
        paths[path] = _post("Score pairs of texts.", ScoreRequest, ScoreAnswer)
    for path in RERANK_PATHS:
        paths[path] = _post("Rank documents by how well they answer a query.", RerankRequest, RerankAnswer)
    for path in COHERE_PATHS:
        paths[path] = _post("Rank documents, as Cohere does.", CohereRerankRequest, CohereRerankAnswer)
    for path in CLASSIFY_PATHS:
        paths[path] = _post("Classify texts.", ClassifyRequest, ClassifyAnswer)
    paths["/v1/load_lora_adapter"] = _post("Load a LoRA adapter. For operators.", LoadAdapterRequest, AdapterAnswer)
    paths["/v1/unload_lora_adapter"] = _post(
        "Unload a LoRA adapter. For operators.", UnloadAdapterRequest, AdapterAnswer
    )
    paths |= _cache_paths()
    for path, summary in OPEN.items():
        paths[path] = _get(summary, ANY_JSON)
        paths[path]["get"]["security"] = []
    paths["/ping"]["post"] = paths["/ping"]["get"]
    paths |= _messages_paths() | _ollama_paths()
    for path in filter(takes_x_api_key, paths):
        operation = paths[path].get("post") or paths[path]["get"]
        operation["security"] = [{}, {"key": []}, {"x-api-key": []}]
    return paths


def _cache_paths() -> Schema:
    """Return the paths on which operators store prompts and move their blocks."""
    warm = _post("Compute prompts and keep them in the cache. For operators.", CacheWarmRequest, CacheWarmAnswer)
    bundle = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    export = _post("Return the KV blocks of a prompt as a bundle. For operators.", CacheExportRequest, CacheWarmAnswer)
    export["post"]["responses"] = _answers(bundle)
    names = [{"name": name, "in": "query", "schema": STRING} for name in ("model", "cache_salt")]
    take_in = {
        "summary": "Import the KV blocks of a bundle. For operators.",
        "parameters": names,
        "requestBody": {"required": True, "content": bundle},
        "responses": _answers(_json(CacheImportAnswer)),
    }
    return {"/cache/warm": warm, "/cache/export": export, "/cache/import": {"post": take_in}}


def _ollama_paths() -> Schema:
    """Return the paths of Ollama's API, except paths that always refuse."""
    chat, generate = _lines(OllamaChatAnswer), _lines(OllamaGenerateAnswer)
    paths: Schema = {
        "/api/chat": _post("Answer a conversation (Ollama).", OllamaChatRequest, OllamaChatAnswer, chat),
        "/api/generate": _post("Answer a text (Ollama).", OllamaGenerateRequest, OllamaGenerateAnswer, generate),
        "/api/show": _post("Describe a served model (Ollama).", OllamaShowRequest, ShownModel),
        "/api/embed": _post("Make vectors of texts (Ollama).", OllamaEmbedRequest, OllamaEmbedAnswer),
        "/api/embeddings": _post(
            "Make a vector of a text (Ollama, older).", OllamaEmbeddingsRequest, OllamaEmbeddingsAnswer
        ),
        "/api/tags": _get("List the served models (Ollama).", _json(ListedModels)),
        "/api/ps": _get("List the loaded models (Ollama).", _json(LoadedModels)),
        "/api/version": _get("The version of Ollama's interface.", _json(OllamaVersion)),
    }
    return _with_errors(paths, OllamaErrorBody)


def _messages_paths() -> Schema:
    """Return the paths of Anthropic's API."""
    count = _post("Count the tokens of a conversation (Anthropic).", CountTokensRequest, TokensCounted)
    answer = _post("Answer a conversation (Anthropic).", MessagesRequest, MessageAnswer, _event(JSON_TEXT))
    return _with_errors({MESSAGES_PATH: answer, f"{MESSAGES_PATH}/count_tokens": count}, MessagesErrorBody)


def _with_errors(paths: Schema, kind: type) -> Schema:
    """Return paths whose errors have another form. Mutates them."""
    for path in paths.values():
        for operation in path.values():
            for status in ("4XX", "5XX"):
                operation["responses"][status]["content"] = _json(kind)
    return paths


def _get(summary: str, content: Schema) -> Schema:
    return {"get": {"summary": summary, "responses": _answers(content)}}


def _post(summary: str, request: type, answer: type, stream: Schema | None = None) -> Schema:
    """Return an operation that answers in one piece or, with `stream`, also as a stream."""
    content = _json(answer) | (stream or {})
    body = {"required": True, "content": _json(request)}
    return {"post": {"summary": summary, "requestBody": body, "responses": _answers(content)}}


def _chunks(kind: type) -> Schema:
    """Return the form of a stream of chunks, which ends with the event [DONE]."""
    chunk = {**JSON_TEXT, "contentSchema": kind}
    return _event(any_of(chunk, {"const": "[DONE]"}))


def _event(data: Schema) -> Schema:
    return {"text/event-stream": {"itemSchema": object_of({"event": STRING, "data": data}, ["data"])}}


def _lines(kind: type) -> Schema:
    return {"application/x-ndjson": {"itemSchema": kind}}


def _answers(content: Schema) -> Schema:
    refused = {"description": "The request was refused.", "content": _json(ErrorBody)}
    failed = {"description": "The server cannot answer.", "content": _json(ErrorBody)}
    return {"200": {"description": "The answer.", "content": content}, "4XX": refused, "5XX": failed}


def _json(kind: type) -> Schema:
    return {"application/json": {"schema": kind}}
