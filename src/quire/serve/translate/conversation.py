"""Conversations of chat and /tokenize: the allowed messages, and the options of the chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.errors import unsupported

EFFORT: Final = "reasoning_effort"
NO_EFFORT: Final = (None, "none")
SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables of chat templates that turn reasoning on and off."""

REFUSED_IN_MESSAGES: Final = ("audio", "function_call", "refusal")
"""Keys of a message that templates do not pass to the model."""


def chat_options(
    tokenizer: Tokenizer | None,
    variables: Mapping[str, Any] | None,
    *,
    effort: str | None = None,
    effort_field: str = EFFORT,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> ChatOptions:
    """Return the options of the chat template; raises for variables that the model's template does not use.

    A client can set the template's variables to plain values. It can never send a template, or access the renderer.
    """
    known = frozenset[str]() if tokenizer is None else tokenizer.template_variables
    values = dict(variables or {})
    for name, value in values.items():
        if name not in known:
            allowed = f"names that the chat template of this model uses: {', '.join(sorted(known)) or 'it has none'}"
            raise InvalidRequestError("chat_template_kwargs", name, allowed)
        if not (value is None or isinstance(value, str | int | float)):  # bool is a kind of int
            raise InvalidRequestError(f"chat_template_kwargs.{name}", value, "a text, a number, true, false or null")
    if effort not in NO_EFFORT:
        if EFFORT not in known:
            raise unsupported(effort_field, "the chat template of this model does not use it")
        values.setdefault(EFFORT, effort)
    return ChatOptions(tools=tools, variables=values)


def with_ending(
    options: ChatOptions, add_generation_prompt: bool | None, continue_final_message: bool | None
) -> ChatOptions:
    """Return options with the end of the prompt: the start of an answer, or the last message, to be continued or not.

    >>> with_ending(ChatOptions(), None, True).continue_final_message
    True
    """
    if continue_final_message and add_generation_prompt:
        raise InvalidRequestError("add_generation_prompt", True, "false, because continue_final_message is true")
    return replace(
        options,
        add_generation_prompt=add_generation_prompt is not False and not continue_final_message,
        continue_final_message=bool(continue_final_message),
    )


def image_part(data: object, where: str) -> dict[str, Any]:
    """Return the part of a content for an image, a data URL or base64; errors will name `where`."""
    if not isinstance(data, str) or not data:
        raise InvalidRequestError(where, data, "an image as base64")
    return {"type": "image", "image": data, "where": where}


def begun_by(form: AnswerForm | None, messages: Sequence[Mapping[str, Any]]) -> AnswerForm | None:
    """Return the form of answers that continue the last message. Does not mutate."""
    content = messages[-1].get("content") if messages else None
    parts = content if isinstance(content, list) else [{"text": content}]
    texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
    return None if form is None else replace(form, begun="".join(text for text in texts if isinstance(text, str)))


def require_plain_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise for a message with a key in `REFUSED_IN_MESSAGES`. Does not mutate."""
    if not messages:
        raise InvalidRequestError("messages", messages, "at least one message")
    for index, message in enumerate(messages):
        for key in REFUSED_IN_MESSAGES:
            if message.get(key) is not None:
                raise unsupported(f"messages[{index}].{key}", "this server supports text only")
