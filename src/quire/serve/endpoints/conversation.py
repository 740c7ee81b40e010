"""Conversations become prompts: what chat, responses and /tokenize have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from quire.core.errors import InvalidRequestError
from quire.engine.prompts import ChatOptions, Message, Prompt
from quire.engine.tokenizer import Tokenizer
from quire.serve.endpoints.call import Call, needs_truncation, truncated
from quire.serve.errors import unsupported
from quire.serve.generation import renamed
from quire.serve.schemas.chat import require_plain_messages
from quire.serve.schemas.sampling import SamplingFields

EFFORT: Final = "reasoning_effort"
NO_EFFORT: Final = (None, "none")

ConversationFields = TypeVar("ConversationFields", bound=SamplingFields)


def chat_options(
    tokenizer: Tokenizer | None,
    variables: Mapping[str, Any] | None,
    *,
    effort: str | None = None,
    effort_field: str = EFFORT,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
) -> ChatOptions:
    """Return how a conversation becomes a prompt; raises for what the model's template does not know.

    A client may set variables of the template, to plain values. It can never bring a template, nor reach the renderer.
    """
    known = frozenset[str]() if tokenizer is None else tokenizer.template_variables
    told = dict(variables or {})
    for name, value in told.items():
        if name not in known:
            allowed = f"names that the chat template of this model uses: {', '.join(sorted(known)) or 'it has none'}"
            raise InvalidRequestError("chat_template_kwargs", name, allowed)
        if not (value is None or isinstance(value, str | int | float)):  # a truth is an integer, too
            raise InvalidRequestError(f"chat_template_kwargs.{name}", value, "a text, a number, true, false or null")
    if effort not in NO_EFFORT:
        if EFFORT not in known:
            raise unsupported(effort_field, "the chat template of this model knows no such choice")
        told.setdefault(EFFORT, effort)
    return ChatOptions(add_generation_prompt is not False, tools, told)


async def conversation_prompt(
    call: Call[ConversationFields],
    messages: Sequence[Message],
    options: ChatOptions,
    max_tokens: int | None,
    names: Mapping[str, str],
) -> Prompt:
    """Return a conversation as the engine takes it: cut, where the request wants that. `names` are as for `Wanted`."""
    if not needs_truncation(call.fields):
        return messages
    try:
        ids = await conversation_ids(call.services.model.tokenizer, messages, options)
    except InvalidRequestError as error:
        raise renamed(error, names) from error
    return truncated(ids, call.fields, call.services, max_tokens)


async def conversation_ids(
    tokenizer: Tokenizer | None, messages: Sequence[Mapping[str, Any]], options: ChatOptions
) -> list[int]:
    """Return the tokens of a conversation; they are found beside the event loop, as it may be long."""
    require_plain_messages(messages)
    if tokenizer is None:
        raise InvalidRequestError("messages", "a conversation", "token ids: this server has no tokenizer")
    return await asyncio.to_thread(
        tokenizer.encode_chat,
        messages,
        add_generation_prompt=options.add_generation_prompt,
        tools=options.tools,
        template_variables=options.variables,
    )
