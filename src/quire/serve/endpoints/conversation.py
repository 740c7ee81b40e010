"""Conversations become prompts: what chat, responses and /tokenize have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.engine.text.chat_template import validate_messages, validate_tools
from quire.engine.text.prompts import ChatOptions, Message, Prompt
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.endpoints.call import Call, Fields, needs_truncation, truncated
from quire.serve.errors import unsupported
from quire.serve.generation import Wanted, renamed
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
            raise unsupported(effort_field, "a field that the chat template of this model supports")
        told.setdefault(EFFORT, effort)
    return ChatOptions(add_generation_prompt is not False, tools, told)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation, how it becomes a prompt, and the form of its answers; None: plain text."""

    messages: Sequence[Message]
    options: ChatOptions
    form: AnswerForm | None = None

    def told(self) -> Conversation:
        """Return it as the template of the model wants it; raises `InvalidRequestError`. Does not mutate."""
        if self.form is None or self.form.teller is None:
            return self
        plain = validate_messages(self.messages)
        messages, tools = self.form.teller.told(plain, validate_tools(self.options.tools))
        return replace(self, messages=messages, options=replace(self.options, tools=tools))


async def conversation_prompt(
    call: Call[ConversationFields], asked: Conversation, sampling: SamplingParams, names: Mapping[str, str]
) -> tuple[Prompt, SamplingParams]:
    """Return a conversation as the engine takes it, cut where the request wants that, and what holds its answers.

    What holds them depends on the end of the prompt, where a template may have begun the reasoning. `names` are as for
    `Wanted`.
    """
    form = asked.form
    is_plain = form is None or not (form.tools or form.teller or sampling.grammar)
    if is_plain and not needs_truncation(call.fields):
        return asked.messages, sampling
    try:
        ids = await conversation_ids(call, asked)
    except InvalidRequestError as error:
        raise renamed(error, names) from error
    if needs_truncation(call.fields):
        ids = truncated(ids, call.fields, call.services, sampling.max_tokens)
    if form is not None:
        sampling = replace(sampling, grammar=form.grammar(sampling.grammar, form.thinking(ids)))
    return ids, sampling


def with_form(wanted: Wanted, form: AnswerForm | None) -> Wanted:
    """Return what a call wants written, with what the form of its answers needs. Does not mutate."""
    return wanted if form is None else replace(wanted, shown_token_ids=form.shown_token_ids, blame=form.blame)


async def conversation_ids(call: Call[Fields], asked: Conversation) -> list[int]:
    """Return the tokens of a conversation; a long one is rendered and encoded off the event loop."""
    tokenizer = call.services.model.tokenizer
    if tokenizer is None:
        raise InvalidRequestError("messages", "a conversation", "token ids, because this server has no tokenizer")

    def encode() -> list[int]:
        told = asked.told()
        require_plain_messages(told.messages)
        return tokenizer.encode_chat(
            told.messages,
            add_generation_prompt=told.options.add_generation_prompt,
            tools=told.options.tools,
            template_variables=told.options.variables,
        )

    return await call.beside(encode)
