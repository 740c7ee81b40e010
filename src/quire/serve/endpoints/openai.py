"""OpenAI's API for text: /v1/completions, /v1/chat/completions and /v1/responses. Nothing is stored."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.endpoints.line import answer_text
from quire.serve.render.chat import ChatAnswer
from quire.serve.render.completions import CompletionAnswer
from quire.serve.render.responses import ResponseReply
from quire.serve.schemas.chat import ChatRequest
from quire.serve.schemas.completions import CompletionRequest
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.sse import EventStream
from quire.serve.translate.chat import chat_request
from quire.serve.translate.completions import completion_request
from quire.serve.translate.responses import response_request


async def completions(request: Request) -> Response | EventStream:
    """Continue one or many prompts, given as texts or token ids."""
    return await answer_text(request, CompletionRequest, completion_request, CompletionAnswer)


async def chat_completions(request: Request) -> Response | EventStream:
    """Answer a conversation, once or several times."""
    return await answer_text(request, ChatRequest, chat_request, ChatAnswer)


async def responses(request: Request) -> Response | EventStream:
    """Answer a conversation once, in OpenAI's newer API: clients send the whole conversation."""
    return await answer_text(request, ResponseRequest, response_request, ResponseReply)
