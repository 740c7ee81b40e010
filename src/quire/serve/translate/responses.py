"""Turns a request of /v1/responses into a `GenerationRequest`."""

from __future__ import annotations

from typing import Final

from quire.core.errors import InvalidRequestError, shortened
from quire.serve.errors import ApiError, unsupported
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.responses import ResponseRequest
from quire.serve.services import Services
from quire.serve.translate.conversation import chat_options
from quire.serve.translate.grammar import response_held_to
from quire.serve.translate.response_input import messages_of
from quire.serve.translate.response_tools import response_tools
from quire.serve.translate.sampling import require_few_choices, sampling_of, truncation_of
from quire.serve.translate.tools import answer_form

LOGPROBS: Final = "message.output_text.logprobs"
ENCRYPTED: Final = "reasoning.encrypted_content"  # requested by clients without storage; this server has none
NAMES: Final = {
    "prompt": "input",
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
}


def response_request(fields: ResponseRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a response; raises if a field is not valid. Does not mutate."""
    require_supported(fields)
    model = services.model
    messages = messages_of(fields, images=model.report.reads_images)
    choice, held = response_tools(fields), response_held_to(fields.wanted_format)
    form = answer_form(services.config, model.tokenizer, choice)
    logprobs = num_logprobs(fields)
    if form is not None and logprobs is not None:
        raise unsupported(
            "top_logprobs", "log-probabilities are available for plain text, or from /v1/chat/completions"
        )
    sampling = sampling_of(
        fields,
        model.get_default_sampling_params(),
        max_tokens=fields.max_output_tokens,
        logprobs=logprobs,
        grammar=held.grammar,
    )
    options = chat_options(
        model.tokenizer,
        fields.chat_template_kwargs,
        effort=effort_of(fields),
        effort_field="reasoning.effort",
        tools=choice.shown,
    )
    require_few_choices(1, sampling, services)
    return GenerationRequest(
        prompts=[messages],
        sampling=sampling,
        names={**NAMES, "grammar": "tools" if held.grammar is None else held.field},
        chat=options,
        form=form,
        truncation=truncation_of(fields),
        cache_salt=fields.cache_salt,
        priority=fields.priority,
    )


def require_supported(fields: ResponseRequest) -> None:
    """Raise for unsupported settings that would change the answer. Does not mutate."""
    if fields.truncation not in (None, "disabled"):
        raise unsupported("truncation", "this server never truncates a conversation")
    for name in fields.include or ():
        if name not in (LOGPROBS, ENCRYPTED):
            raise unsupported("include", f"this server has no output called {shortened(name)!r}")
    for name in fields.stream_options or {}:
        if name != "include_obfuscation":
            raise ApiError(400, "allowed: include_obfuscation", code="invalid_value", param=f"stream_options.{name}")
    if fields.stream_options and not fields.stream:
        message = "stream_options needs stream: true"
        raise ApiError(400, message, code="invalid_value", param="stream_options")


def effort_of(fields: ResponseRequest) -> str | None:
    """Return the requested reasoning effort, or None. Does not mutate."""
    reasoning = fields.reasoning or {}
    for name, value in reasoning.items():
        if name not in ("effort", "summary", "generate_summary"):
            raise InvalidRequestError(f"reasoning.{name}", value, "effort or summary")
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise InvalidRequestError("reasoning.effort", effort, "a text")
    return effort


def num_logprobs(fields: ResponseRequest) -> int | None:
    """Return how many of the likeliest tokens to report for each token; None: no log-probabilities. Does not mutate."""
    return fields.top_logprobs or 0 if LOGPROBS in (fields.include or ()) or fields.top_logprobs else None
