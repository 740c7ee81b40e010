"""Anthropic's API: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.serve.context import RequestContext
from quire.serve.endpoints.line import answer_loaded, answer_text
from quire.serve.messages_errors import MESSAGES_PATH
from quire.serve.render.answer import json_answer
from quire.serve.render.messages import MessageReply
from quire.serve.run.prompts import encoded_conversation
from quire.serve.schemas.messages import CountTokensRequest, MessagesRequest, TokensCounted
from quire.serve.services import Services
from quire.serve.sse import EventStream
from quire.serve.translate.messages import conversation_of, messages_request


async def messages(request: Request) -> Response | EventStream:
    """Answer a conversation."""
    return await answer_text(request, MessagesRequest, messages_request, MessageReply)


async def count_tokens(request: Request) -> Response:
    """Answer with the number of tokens that a conversation has as a prompt."""
    return await answer_loaded(request, CountTokensRequest, _counted)


async def _counted(fields: CountTokensRequest, services: Services, context: RequestContext) -> Response:
    asked = conversation_of(fields, services)
    prompt = await encoded_conversation(services, context, asked.messages, asked.options, asked.form)
    return json_answer(TokensCounted(len(prompt.token_ids)))


MESSAGES_ROUTES: Final = (
    Route(MESSAGES_PATH, messages, methods=["POST"]),
    Route(f"{MESSAGES_PATH}/count_tokens", count_tokens, methods=["POST"]),
)
