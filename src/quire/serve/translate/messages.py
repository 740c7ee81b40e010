"""Turns a request of /v1/messages into a `GenerationRequest`, and one of count_tokens into a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.tokenizer import Tokenizer
from quire.serve.answer_form import AnswerForm
from quire.serve.errors import unsupported
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.messages import MessagesRequest, OutputWanted
from quire.serve.services import Services
from quire.serve.translate.conversation import EFFORT, SWITCHES, begun_by, chat_options, with_ending
from quire.serve.translate.grammar import Held, held_to_schema
from quire.serve.translate.message_blocks import Message, message_tools, messages_of
from quire.serve.translate.sampling import require_few_choices, sampling_of
from quire.serve.translate.tools import answer_form

NAMES: Final = {"prompt": "messages", "stop": "stop_sequences", "template_variables": "chat_template_kwargs"}
REFUSED: Final = {
    "stop": "use stop_sequences",
    "truncate_prompt_tokens": "max_tokens may be more than the context has left; use /v1/chat/completions",
}
HIGHEST_EFFORT: Final = "high"
"""The highest effort of chat templates; this API has two above it."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in the engine's terms, and the form of its answer."""

    messages: list[Message]
    options: ChatOptions
    form: AnswerForm | None


def messages_request(fields: MessagesRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for an answer; raises if a field is not valid. Does not mutate."""
    for name, why in REFUSED.items():
        if getattr(fields, name) is not None:
            raise unsupported(name, why)
    model, asked, held = services.model, conversation_of(fields, services), _held(fields.output_config)
    stop = {} if fields.stop_sequences is None else {"stop": fields.stop_sequences}
    defaults = model.get_default_sampling_params()
    sampling = sampling_of(fields, defaults, max_tokens=fields.max_tokens, grammar=held.grammar, **stop)
    require_few_choices(1, sampling, services)
    return GenerationRequest(
        prompts=[asked.messages],
        sampling=sampling,
        names={**NAMES, "grammar": "tools" if held.grammar is None else held.field},
        chat=asked.options,
        form=asked.form,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        cuts_output=True,  # clients must send max_tokens, without knowing the context
    )


def conversation_of(fields: MessagesRequest, services: Services) -> Conversation:
    """Return the conversation of a request; raises if a field is not valid. Does not mutate."""
    tokenizer, choice = services.model.tokenizer, message_tools(fields)
    messages = messages_of(fields, images=services.model.report.reads_images)
    form = answer_form(services.config, tokenizer, choice)
    options = chat_options(tokenizer, _variables(fields, tokenizer), tools=choice.shown)
    continues = fields.messages[-1]["role"] == "assistant"  # Anthropic's API has no field that asks for it
    return Conversation(
        messages, with_ending(options, None, continues), begun_by(form, messages) if continues else form
    )


def _held(wanted: OutputWanted | None) -> Held:
    if wanted is None or wanted.format is None:
        return Held()
    return held_to_schema(wanted.format.schema, "output_config.format.schema")


def _variables(fields: MessagesRequest, tokenizer: Tokenizer | None) -> Mapping[str, Any]:
    """Return the variables of the chat template; those for reasoning only if the template uses them.

    Programs send `thinking` and `effort` with every call, whatever model answers.
    """
    known = frozenset[str]() if tokenizer is None else tokenizer.template_variables
    found: dict[str, Any] = {}
    effort = None if fields.output_config is None else fields.output_config.effort
    if effort is not None and EFFORT in known:
        found[EFFORT] = effort if effort in ("low", "medium") else HIGHEST_EFFORT
    switch = next((name for name in SWITCHES if name in known), None)
    if fields.thinking is not None and switch is not None:
        found[switch] = fields.thinking.type != "disabled"
    return found | (fields.chat_template_kwargs or {})
