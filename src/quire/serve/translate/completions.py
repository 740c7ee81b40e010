"""Turns a request of /v1/completions into a `GenerationRequest`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.engine.text.infill import InfillFormat
from quire.serve.errors import ApiError
from quire.serve.run.request import GenerationRequest
from quire.serve.schemas.completions import CompletionRequest
from quire.serve.services import Services
from quire.serve.translate.grammar import Held, held_to
from quire.serve.translate.infill import ended_by, required_infill
from quire.serve.translate.sampling import (
    include_usage,
    max_tokens_of,
    require_few_choices,
    sampling_of,
    truncation_of,
)

PROMPT_FORMS: Final = "a text, a list of token ids, a list of texts, or a list of lists of token ids"
DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's


def completion_request(fields: CompletionRequest, services: Services) -> GenerationRequest:
    """Return the engine's request for a completion; raises if a field is not valid. Does not mutate."""
    usage = include_usage(fields)
    if fields.stream and fields.prompt_logprobs is not None:
        message = "prompt_logprobs needs stream: false; in a stream, use echo with logprobs"
        raise ApiError(400, message, code="invalid_value", param="prompt_logprobs")
    held = held_to(fields.response_format, fields.structured_outputs, fields.grammar)
    sampling, prompts = _sampling(fields, services, held), prompts_of(fields.prompt)
    if fields.suffix:
        infill = required_infill(services, "suffix")
        prompts, sampling = _filled_in(fields, prompts, infill), ended_by(sampling, infill)
    require_few_choices(len(prompts), sampling, services)
    return GenerationRequest(
        prompts=prompts,
        sampling=sampling,
        names={"beam_search": "use_beam_search", "grammar": held.field},
        sent_grammar=held.sent,
        truncation=truncation_of(fields),
        add_special_tokens=fields.add_special_tokens is not False,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
        prompts_only=_wants_prompts_only(fields),
        stream_usage=usage,
    )


def _filled_in(
    fields: CompletionRequest, prompts: Sequence[str | list[int]], infill: InfillFormat
) -> list[str | list[int]]:
    """Return prompts that end with a suffix; raises for a request that a suffix does not suit."""
    if fields.echo:
        raise InvalidRequestError("echo", True, "false, because suffix is set")
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidRequestError("prompt", "token ids", "texts, because suffix is set")
    return [infill.prompt(str(prompt), fields.suffix or "") for prompt in prompts]


def _wants_prompts_only(fields: CompletionRequest) -> bool:
    """Return whether the client wants only the prompt, with its log-probabilities."""
    return bool(fields.echo) and max_tokens_of(fields.max_tokens, fields.max_completion_tokens) == 0


def _sampling(fields: CompletionRequest, services: Services, held: Held) -> SamplingParams:
    asked = max_tokens_of(fields.max_tokens, fields.max_completion_tokens)
    max_tokens = DEFAULT_MAX_TOKENS if asked is None else asked
    if _wants_prompts_only(fields):
        max_tokens = 1  # the engine generates at least one token; it is not shown
    elif max_tokens == 0:
        raise InvalidRequestError("max_tokens", 0, "an integer of at least 1, or 0 if echo is true")
    changes: dict[str, object] = {"max_tokens": max_tokens, "logprobs": fields.logprobs, "grammar": held.grammar}
    if fields.echo and fields.logprobs is not None:
        changes["prompt_logprobs"] = max(fields.logprobs, fields.prompt_logprobs or 0)
    return sampling_of(fields, services.model.get_default_sampling_params(), **changes)


def prompts_of(prompt: str | list[Any], place: str = "prompt") -> list[str | list[int]]:
    """Return the prompts of a request as a list; raises `InvalidRequestError` if one is not a prompt. Does not mutate.

    `place`: the name of their field.

    >>> prompts_of("one"), prompts_of([1, 2]), prompts_of(["one", "two"]), prompts_of([[1], [2]])
    (['one'], [[1, 2]], ['one', 'two'], [[1], [2]])
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {str}:
        return list(prompt)
    if kinds == {list}:
        return [_token_ids(each, f"{place}[{index}]") for index, each in enumerate(prompt)]
    return [_token_ids(prompt, place)]


def _token_ids(values: list[Any], where: str) -> list[int]:
    if not values:
        raise InvalidRequestError(where, values, PROMPT_FORMS)
    if set(map(type, values)) != {int}:
        index = next(index for index, value in enumerate(values) if type(value) is not int)
        raise InvalidRequestError(f"{where}[{index}]", values[index], f"a token id; a prompt is {PROMPT_FORMS}")
    return values
