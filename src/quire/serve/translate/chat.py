"""Turns a request of /v1/chat/completions into a `GenerationRequest`."""

from __future__ import annotations

from quire.serve.errors import ApiError
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.chat import ChatRequest
from quire.serve.services import Services
from quire.serve.translate.conversation import begun_by, chat_options, require_plain_messages, with_ending
from quire.serve.translate.grammar import held_to
from quire.serve.translate.sampling import (
    include_usage,
    max_tokens_of,
    require_few_choices,
    sampling_of,
    truncation_of,
)
from quire.serve.translate.tools import answer_form, tool_choice_of


def chat_request(fields: ChatRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a chat; raises if a field is not valid. Does not mutate."""
    model, usage = services.model, include_usage(fields)
    if fields.stream and fields.prompt_logprobs is not None:
        message = "prompt_logprobs needs stream: false"
        raise ApiError(400, message, code="invalid_value", param="prompt_logprobs")
    require_plain_messages(fields.messages)
    choice = tool_choice_of(fields.tools, fields.tool_choice, fields.parallel_tool_calls)
    form = answer_form(services.config, model.tokenizer, choice)
    held = held_to(fields.response_format, fields.structured_outputs, fields.grammar)
    sampling = sampling_of(
        fields,
        model.get_default_sampling_params(),
        max_tokens=max_tokens_of(fields.max_tokens, fields.max_completion_tokens),
        logprobs=num_logprobs(fields.logprobs, fields.top_logprobs),
        grammar=held.grammar,
    )
    options = chat_options(
        model.tokenizer,
        fields.chat_template_kwargs,
        effort=fields.reasoning_effort,
        tools=choice.shown,
    )
    options = with_ending(options, fields.add_generation_prompt, fields.continue_final_message)
    if options.continue_final_message:
        form = begun_by(form, fields.messages)
    require_few_choices(1, sampling, services)
    names = {
        "prompt": "messages",
        "template_variables": "chat_template_kwargs",
        "logprobs": "top_logprobs",
        "max_tokens": "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens",
        "beam_search": "use_beam_search",
        "grammar": "tools" if held.grammar is None else held.field,
    }
    return GenerationRequest(
        prompts=[fields.messages],
        sampling=sampling,
        names=names,
        sent_grammar=held.sent,
        chat=options,
        form=form,
        truncation=truncation_of(fields),
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        stream_usage=usage,
    )


def num_logprobs(logprobs: bool | None, top_logprobs: int | None) -> int | None:
    """Return how many of the likeliest tokens to report for each token; None: no log-probabilities.

    >>> num_logprobs(True, None), num_logprobs(True, 3), num_logprobs(None, None)
    (0, 3, None)
    """
    if not logprobs:
        if top_logprobs is not None:
            message = "top_logprobs needs logprobs: true"
            raise ApiError(400, message, code="invalid_value", param="top_logprobs")
        return None
    return top_logprobs or 0
