"""The fields that say how text is written, shared by all endpoints that write some, and the step to `SamplingParams`.

Types are checked when a body is read. Values are checked by `quire.core.validate` alone, as for every other door; the
ranges that stand here are for the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import SamplingParams
from quire.core.validate import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_LOGPROBS,
    MAX_NAME_LENGTH,
    MAX_PRIORITY,
    MAX_SALT_LENGTH,
    MAX_SEED,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_TOKEN_IDS,
)
from quire.serve.errors import ApiError
from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.formats import ResponseFormat, StructuredOutputs

MAX_STOPS: Final = 4  # as OpenAI has it
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def within(low: float, high: float) -> Meta:
    """Return the range of a number, for the OpenAPI document."""
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def at_most(count: int) -> Meta:
    """Return the greatest length of a list, for the OpenAPI document."""
    return Meta(extra_json_schema={"maxItems": count})


LogprobCount = Annotated[int, within(0, MAX_LOGPROBS)]
TokenCount = Annotated[int, within(0, (1 << 31) - 1)]
TokenId = Annotated[int, within(0, (1 << 31) - 1)]
SequenceCount = Annotated[int, within(1, 1 << 20)]
StopString = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_STOP_STRING_LENGTH})]
BadWord = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_BAD_WORD_LENGTH})]
ShownId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)]


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells besides the text. Obfuscation is accepted and not done."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """How text is written. A field that is not given has the value that the makers of the model chose for it."""

    stream: bool | None = None
    temperature: Annotated[float, within(0, 1e6)] | None = None
    top_p: Annotated[float, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] | None = None
    top_k: Annotated[int, within(-1, (1 << 31) - 1)] | None = None
    min_p: Annotated[float, within(0, 1)] | None = None
    seed: Annotated[int, within(0, MAX_SEED)] | None = None
    presence_penalty: Annotated[float, within(-2, 2)] | None = None
    frequency_penalty: Annotated[float, within(-2, 2)] | None = None
    repetition_penalty: Annotated[float, within(0.01, 100)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Meta(extra_json_schema={"pattern": "^(0|[1-9][0-9]{0,9})$"})], float],
            Meta(extra_json_schema={"maxProperties": MAX_BIASES}),
        ]
        | None
    ) = None
    stop: StopString | Annotated[list[StopString], at_most(MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], at_most(MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: TokenCount | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: Annotated[list[BadWord], at_most(MAX_BAD_WORDS)] | None = None
    priority: Annotated[int, within(-MAX_PRIORITY, MAX_PRIORITY)] | None = None
    cache_salt: CacheSalt | None = None
    request_id: ShownId | None = None
    truncate_prompt_tokens: Annotated[int, Meta(extra_json_schema={"minimum": -1})] | None = None
    truncation_side: Literal["left", "right"] | None = None


class ChoiceFields(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """How many texts are written, what they are held to, how they are found, and what is told of their tokens."""

    n: SequenceCount | None = None
    best_of: SequenceCount | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, within(-10, 10)] | None = None
    early_stopping: bool | Literal["never"] | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: LogprobCount | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


PASSED: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "skip_special_tokens",
    "allowed_token_ids",
    "bad_words",
    "n",
    "best_of",
    "length_penalty",
    "early_stopping",
    "prompt_logprobs",
)
"""Fields whose names and values are those of `SamplingParams`."""


def sampling_of(fields: SamplingFields, defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """Return the sampling parameters of a request: `changes`, then what it says, then the defaults. Does not mutate.

    >>> sampling_of(ChoiceFields(n=2, logit_bias={"7": 1.0}), SamplingParams(temperature=0.6), max_tokens=16)
    SamplingParams(n=2, ..., temperature=0.6, ..., max_tokens=16, ..., logit_bias=((7, 1.0),), ...)
    """
    require_few_stops(fields.stop)
    given: dict[str, Any] = {name: value for name in PASSED if (value := getattr(fields, name, None)) is not None}
    if fields.logit_bias:
        given["logit_bias"] = _biases(fields.logit_bias)
    if getattr(fields, "use_beam_search", None):
        # A search ranks texts by what the model says of them: how the makers want it sampled has no place in it.
        defaults = SamplingParams(temperature=0.0, beam_search=True)
    return replace(defaults, **(given | changes))


def require_few_stops(stop: str | list[str] | None) -> None:
    """Raise where there are more stop strings than a client of OpenAI may give."""
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise InvalidRequestError("stop", f"{len(stop)} strings", f"at most {MAX_STOPS} strings")


def max_tokens_of(max_tokens: int | None, max_completion_tokens: int | None) -> int | None:
    """Return how many tokens are wanted, by the old name or the new one; raises where the two differ.

    >>> max_tokens_of(5, None), max_tokens_of(None, 6), max_tokens_of(7, 7), max_tokens_of(None, None)
    (5, 6, 7, None)
    """
    if max_completion_tokens is None or max_tokens == max_completion_tokens:
        return max_tokens
    if max_tokens is None:
        return max_completion_tokens
    raise InvalidRequestError("max_tokens", max_tokens, "the same as max_completion_tokens, or none")


def include_usage(fields: ChoiceFields) -> tuple[bool, bool]:
    """Return whether a stream tells the usage at its end, and whether it does so in every chunk."""
    options = fields.stream_options
    if options is None:
        return False, False
    if not fields.stream:
        message = "stream_options are allowed only where stream is true"
        raise ApiError(400, message, code="invalid_value", param="stream_options")
    return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Return biases by token id; one way to write an id, so that none can stand twice."""
    if len(biases) > MAX_BIASES:
        raise InvalidRequestError("logit_bias", f"{len(biases)} entries", f"at most {MAX_BIASES} entries")
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError("logit_bias", key, "token ids as keys, in decimal digits")
    return {int(key): bias for key, bias in biases.items()}
