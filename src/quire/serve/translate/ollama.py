"""Turns requests of Ollama's API into `GenerationRequest`s.

    /api/chat       messages, tools ───────────────┐
    /api/generate   system, prompt ──► messages ───┼──► GenerationRequest        as from /v1/chat/completions
                    prompt, raw or suffix ─────────┘                             as from /v1/completions
    neither         no prompts: only load the model

Only the names of the sampling parameters differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from msgspec.structs import replace as replace_fields

from quire.core.errors import InvalidRequestError
from quire.core.grammar import Grammar
from quire.core.sampling_params import SamplingParams
from quire.engine.text.chat_template import ChatOptions
from quire.engine.text.prompts import Prompt
from quire.serve.answer_form import AnswerForm
from quire.serve.errors import unsupported
from quire.serve.loading.keep_alive import keep_alive_s
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.ollama import (
    OPTION_NAMES,
    REFUSED_OPTIONS,
    KeptFields,
    OllamaChatRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaOptions,
)
from quire.serve.services import Services
from quire.serve.translate.chat import num_logprobs
from quire.serve.translate.conversation import SWITCHES, begun_by, chat_options, with_ending
from quire.serve.translate.grammar import Held, held_to_schema
from quire.serve.translate.infill import ended_by, required_infill
from quire.serve.translate.ollama_messages import TEXT_ONLY, messages_of, with_images
from quire.serve.translate.sampling import with_penalty_window
from quire.serve.translate.tools import answer_form, tool_choice_of

NAMES: Final = {
    **{ours: f"options.{theirs}" for ours, theirs in OPTION_NAMES.items()},
    "logprobs": "top_logprobs",
    "template_variables": "think",
}
"""The client's names for fields of the engine."""

NO_LIMIT: Final = (None, -2, -1, 0)
"""Values of `num_predict` for no limit but the context."""

RANDOM_SEED: Final = -1


def ollama_chat_request(fields: OllamaChatRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a chat; raises if a field is not valid. Does not mutate."""
    messages = messages_of(fields.messages or [], images=services.model.report.reads_images)
    return _conversation(fields, services, messages, fields.tools, "messages")


def ollama_generate_request(fields: OllamaGenerateRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a text; raises if a field is not valid. Does not mutate."""
    if fields.raw or fields.suffix:
        for name in ("images", "system", "think"):
            if getattr(fields, name):
                raise unsupported(name, "a raw prompt, or one with a suffix, has no chat template")
    if fields.suffix:
        infill = required_infill(services, "suffix")
        request = _request(fields, services, infill.prompt(fields.prompt or "", fields.suffix), "prompt")
        return replace(request, sampling=ended_by(request.sampling, infill))
    if fields.raw:
        return _request(fields, services, fields.prompt or None, "prompt")
    asked: dict[str, Any] = {"role": "user", "content": fields.prompt or ""}
    if fields.images:
        if not services.model.report.reads_images:
            raise unsupported("images", TEXT_ONLY)
        asked["content"] = with_images(fields.images, asked["content"], "images")
    messages = [asked] if asked["content"] else []
    if messages and fields.system:
        messages.insert(0, {"role": "system", "content": fields.system})
    return _conversation(fields, services, messages, None, "prompt")


def asks_nothing(fields: OllamaFields) -> bool:
    """Return whether a request only loads or unloads its model. Does not mutate."""
    match fields:
        case OllamaChatRequest():
            return not fields.messages
        case OllamaGenerateRequest():
            return not (fields.prompt or fields.suffix or fields.images)
    return False


def wanted_keep_alive_s(fields: KeptFields) -> float | None:
    """Return how long the model must stay loaded; None: not set. Raises if `keep_alive` is not a time."""
    try:
        return None if fields.keep_alive is None else keep_alive_s(fields.keep_alive)
    except ValueError as error:
        raise InvalidRequestError("keep_alive", fields.keep_alive, str(error)) from None


def _conversation(
    fields: OllamaFields,
    services: Services,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    place: str,
) -> GenerationRequest:
    choice = tool_choice_of(tools, None, None)
    form = answer_form(services.config, services.model.tokenizer, choice)
    variables, effort = _thinking(fields.think, form, services)
    chat = chat_options(services.model.tokenizer, variables, effort=effort, effort_field="think", tools=choice.shown)
    continues = bool(messages) and messages[-1].get("role") == "assistant" and not messages[-1].get("tool_calls")
    chat = with_ending(chat, None, continues)  # as Ollama does, without being asked
    if continues:
        form = begun_by(form, messages)
    return _request(fields, services, messages, place, chat=chat, form=form)


def _request(
    fields: OllamaFields,
    services: Services,
    prompt: Prompt | None,
    place: str,
    *,
    chat: ChatOptions | None = None,
    form: AnswerForm | None = None,
) -> GenerationRequest:
    """Return the request of a prompt, named `place`; without prompts if it is empty."""
    held = _held(fields.format)
    return GenerationRequest(
        prompts=[prompt] if prompt else [],
        sampling=_sampling(fields, services, held.grammar),
        names={**NAMES, "prompt": place, "messages": place, "grammar": "tools" if held.grammar is None else held.field},
        chat=chat,
        form=form,
    )


def _held(wanted: str | Mapping[str, Any] | None) -> Held:
    if isinstance(wanted, Mapping):
        return held_to_schema(dict(wanted), "format")
    if wanted not in (None, "", "json"):
        raise InvalidRequestError("format", wanted, '"json", or a JSON schema')
    return Held(Grammar.json_object(), "format") if wanted else Held()


def _options(fields: OllamaFields) -> OllamaOptions:
    """Return the options of a request, including those outside `options`, which Ollama ignores."""
    options = fields.options or OllamaOptions()
    outside = {"temperature": fields.temperature, "top_p": fields.top_p, "num_predict": fields.max_output_tokens}
    return replace_fields(options, **{name: value for name, value in outside.items() if getattr(options, name) is None})


def _sampling(fields: OllamaFields, services: Services, grammar: Grammar | None) -> SamplingParams:
    options, report = _options(fields), services.model.report
    for name, refusal in REFUSED_OPTIONS.items():
        if getattr(options, name) not in (None, *refusal.nothing):
            raise unsupported(f"options.{name}", refusal.why)
    max_model_len = services.model.limits.max_model_len
    if min(options.num_ctx or 0, report.context_length) > max_model_len:  # if above the model's own, Ollama lowers it
        allowed = f"at most {max_model_len}, the context of this server (--max-model-len)"
        raise InvalidRequestError("options.num_ctx", options.num_ctx, allowed)
    given: dict[str, Any] = {
        ours: value for ours, theirs in OPTION_NAMES.items() if (value := getattr(options, theirs)) is not None
    }
    if options.seed == RANDOM_SEED:
        del given["seed"]
    given["max_tokens"] = None if options.num_predict in NO_LIMIT else options.num_predict
    given["logprobs"] = num_logprobs(fields.logprobs, fields.top_logprobs)
    given["grammar"] = grammar
    defaults = services.model.get_default_sampling_params()
    return with_penalty_window(given, defaults, options.repeat_last_n, "options.repeat_last_n")


def _thinking(
    think: bool | str | None, form: AnswerForm | None, services: Services
) -> tuple[Mapping[str, Any], str | None]:
    """Return the template variables and the effort that turn the model's reasoning on or off.

    Raises `ApiError` if the model does not support `think`.
    """
    tokenizer = services.model.tokenizer
    known = frozenset[str]() if tokenizer is None else tokenizer.template_variables
    switch = next((name for name in SWITCHES if name in known), None)
    thinks, has_efforts = form is not None and form.reasoning is not None, "reasoning_effort" in known
    if think is None or (think is False and not thinks):
        return {}, None
    if think and not thinks and not has_efforts:
        raise unsupported("think", "this model does not reason")
    if think is False and switch is None and not has_efforts:  # with efforts (gpt-oss), Ollama ignores true and false
        raise unsupported("think", "the chat template of this model cannot turn reasoning off")
    return {} if switch is None else {switch: bool(think)}, think if isinstance(think, str) else None
