"""POST /v1/chat/completions: answers a conversation, once or several times."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.endpoints.line import answer_text
from quire.serve.render.chat import ChatAnswer
from quire.serve.schemas.chat import ChatRequest
from quire.serve.sse import EventStream
from quire.serve.translate.chat import chat_request


async def chat_completions(request: Request) -> Response | EventStream:
    """Answer a request."""
    return await answer_text(request, ChatRequest, chat_request, ChatAnswer)
