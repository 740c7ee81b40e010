"""POST /v1/completions: continues one or many prompts, given as texts or token ids."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.endpoints.line import answer_text
from quire.serve.render.completions import CompletionAnswer
from quire.serve.schemas.completions import CompletionRequest
from quire.serve.sse import EventStream
from quire.serve.translate.completions import completion_request


async def completions(request: Request) -> Response | EventStream:
    """Answer a request."""
    return await answer_text(request, CompletionRequest, completion_request, CompletionAnswer)
