"""Turns prompts for the cache into a `GenerationRequest`: the engine also generates one token, which is dropped."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.cache import MAX_PROMPTS, CacheExportRequest, CachePromptFields
from quire.serve.services import Services
from quire.serve.translate.completions import prompts_of
from quire.serve.translate.conversation import chat_options, require_plain_messages, with_ending
from quire.serve.translate.tools import unanswered_form

ONE_TOKEN: Final = SamplingParams(max_tokens=1, temperature=0)


def cache_request(fields: CachePromptFields, services: Services) -> GenerationRequest:
    """Return the engine's request for prompts of the cache; raises if a field is not valid. Does not mutate."""
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequestError("prompt", fields.prompt, "either a prompt or messages, not both")
    made = _of_messages(fields, services) if fields.prompt is None else _of_prompts(fields)
    special = fields.add_special_tokens is not False
    return replace(made, add_special_tokens=special, cache_salt=fields.cache_salt, priority=fields.priority)


def _of_messages(fields: CachePromptFields, services: Services) -> GenerationRequest:
    messages = fields.messages or []
    require_plain_messages(messages)
    tokenizer = services.model.tokenizer
    choice, form = unanswered_form(services.config, tokenizer, fields.tools)
    options = chat_options(tokenizer, fields.chat_template_kwargs, tools=choice.shown)
    options = with_ending(options, fields.add_generation_prompt, fields.continue_final_message)
    names = {"prompt": "messages", "template_variables": "chat_template_kwargs"}
    return GenerationRequest([messages], ONE_TOKEN, names, chat=options, form=form, prompts_only=True)


def _of_prompts(fields: CachePromptFields) -> GenerationRequest:
    prompts = prompts_of(fields.prompt or [])
    most = 1 if isinstance(fields, CacheExportRequest) else MAX_PROMPTS
    if len(prompts) > most:
        raise InvalidRequestError("prompt", f"{len(prompts)} prompts", f"at most {most} per request")
    return GenerationRequest(prompts, ONE_TOKEN, {}, prompts_only=True)
