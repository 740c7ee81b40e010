"""POST /v1/responses: one answer, in the form of OpenAI's newer interface. Nothing is kept: the client sends it all."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from quire.serve.endpoints.line import answer_text
from quire.serve.render.responses import ResponseReply
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.sse import EventStream
from quire.serve.translate.responses import response_request


async def responses(request: Request) -> Response | EventStream:
    """Answer a call."""
    return await answer_text(request, ResponseRequest, response_request, ResponseReply)
