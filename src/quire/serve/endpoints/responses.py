"""POST /v1/responses: one answer, in OpenAI's newer API. Nothing is stored: clients send the whole conversation."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.endpoints.line import answer_text
from quire.serve.render.responses import ResponseReply
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.sse import EventStream
from quire.serve.translate.responses import response_request


async def responses(request: Request) -> Response | EventStream:
    """Answer a request."""
    return await answer_text(request, ResponseRequest, response_request, ResponseReply)
