"""Turns prompts for the cache into a `GenerationRequest`: the engine also generates one token, which is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.engine.text.prompts import Prompt, estimated_tokens
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.cache import MAX_PROMPTS, CacheExportRequest, CachePromptFields
from quire.serve.services import Services
from quire.serve.translate.completions import prompts_of
from quire.serve.translate.conversation import chat_options, require_plain_messages, with_ending

ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0)


def cache_request(fields: CachePromptFields, services: Services) -> GenerationRequest:
    """Return the engine's request for prompts of the cache; raises if a field is not valid. Does not mutate."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("prompt", fields.prompt, "either a prompt or messages, not both")
    made = _of_messages(fields, services) if fields.prompt is None else _of_prompts(fields, services)
    special = fields.add_special_tokens is not False
    return replace(made, add_special_tokens=special, cache_salt=fields.cache_salt, priority=fields.priority)


def _of_messages(fields: CachePromptFields, services: Services) -> GenerationRequest:
    messages = fields.messages or []
    require_plain_messages(messages)
    options = chat_options(services.model.tokenizer, fields.chat_template_kwargs, tools=fields.tools)
    options = with_ending(options, fields.add_generation_prompt, fields.continue_final_message)
    names = {"prompt": "messages", "template_variables": "chat_template_kwargs"}
    return replace(_request(services, [messages], names), chat=options)


def _of_prompts(fields: CachePromptFields, services: Services) -> GenerationRequest:
    prompts = prompts_of(fields.prompt or [])
    most = 1 if isinstance(fields, CacheExportRequest) else MAX_PROMPTS
    if len(prompts) > most:
        raise InvalidRequestError("prompt", f"{len(prompts)} prompts", f"at most {most} per request")
    return _request(services, prompts, {})


def _request(services: Services, prompts: Sequence[Prompt], names: dict[str, str]) -> GenerationRequest:
    longest = services.model.limits.max_model_len
    return GenerationRequest(
        prompts=prompts,
        num_sequences=len(prompts),
        num_tokens=sum(estimated_tokens(prompt, longest) for prompt in prompts),
        sampling=ONE_TOKEN,
        names=names,
        prompts_only=True,
    )
