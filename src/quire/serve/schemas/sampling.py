"""The fields that say how text is written, shared by all endpoints that write some, and the step to `SamplingParams`.

Types are checked when a body is read. Values are checked by `quire.core.validate` alone, as for every other door. Most
fields are made from the declarations in `quire.core.sampling_params`, with the ranges for the OpenAPI document.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from quire.core.errors import InvalidRequestError
from quire.core.parameters import Biases, Choice, Integer, Kind, Number, Place, Switch, Texts, TokenIds
from quire.core.sampling_params import (
    MAX_BIASES,
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_STOP_STRING_LENGTH,
    PARAMETERS,
    SamplingParams,
)
from quire.core.validate import MAX_NAME_LENGTH, MAX_PRIORITY, MAX_SALT_LENGTH
from quire.serve.errors import ApiError
from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.formats import ResponseFormat, StructuredOutputs

MAX_STOPS: Final = 4  # as OpenAI has it
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def within(low: float, high: float) -> Meta:
    """Return the range of a number, for the OpenAPI document."""
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def at_most(count: int | None) -> Meta:
    """Return the greatest length of a list, for the OpenAPI document; None: any length."""
    return Meta(extra_json_schema={} if count is None else {"maxItems": count})


LogprobCount = Annotated[int, within(0, MAX_LOGPROBS)]
TokenCount = Annotated[int, within(0, MAX_INT32)]
TokenId = Annotated[int, within(0, MAX_INT32)]
ShownId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)]
StopString = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_STOP_STRING_LENGTH})]


def _field_type(kind: Kind) -> Any:
    """Return the type of the field of a parameter."""
    match kind:
        case Integer():
            return Annotated[int, within(kind.low, kind.high)]
        case Number():
            low = "exclusiveMinimum" if kind.is_above else "minimum"
            return Annotated[float, Meta(extra_json_schema={low: kind.low, "maximum": kind.high})]
        case Switch():
            return bool
        case Choice():
            return bool | Literal[kind.words]
        case Texts():
            text = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": kind.longest})]
            return Annotated[list[text], at_most(kind.most)]
        case TokenIds():
            return Annotated[list[TokenId], at_most(kind.most)]
        case Biases():
            token_id = Annotated[str, Meta(extra_json_schema={"pattern": f"^({_TOKEN_ID.pattern})$"})]
            return Annotated[dict[token_id, float], Meta(extra_json_schema={"maxProperties": kind.most})]
    raise TypeError(f"no field of a body is a {type(kind).__name__}")


def _names(*places: Place) -> tuple[str, ...]:
    return tuple(name for name, declared in PARAMETERS.items() if declared.place in places)


def _with_parameters(base: type[msgspec.Struct], name: str, *places: Place) -> type[msgspec.Struct]:
    """Return a struct that also has the parameters of these places as fields; None: the field is not given."""
    fields = [
        (each, Annotated[_field_type(PARAMETERS[each].kind) | None, Meta(description=PARAMETERS[each].help)], None)
        for each in _names(*places)
    ]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream tells besides the text. Obfuscation is accepted and not done."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


if TYPE_CHECKING:

    class TextParameters(ModelFields):
        """The parameters that every endpoint takes."""

        def __getattr__(self, name: str) -> Any: ...

else:
    TextParameters = _with_parameters(ModelFields, "TextParameters", Place.DRAW, Place.TEXT)


class SamplingFields(TextParameters, kw_only=True, forbid_unknown_fields=True):
    """How text is written. A field that is not given has the value that the makers of the model chose for it."""

    stream: bool | None = None
    stop: StopString | Annotated[list[StopString], at_most(MAX_STOPS)] | None = None
    priority: Annotated[int, within(-MAX_PRIORITY, MAX_PRIORITY)] | None = None
    cache_salt: CacheSalt | None = None
    request_id: ShownId | None = None
    truncate_prompt_tokens: Annotated[int, Meta(extra_json_schema={"minimum": -1})] | None = None
    truncation_side: Literal["left", "right"] | None = None


if TYPE_CHECKING:

    class ChoiceParameters(SamplingFields):
        """The parameters of endpoints that write several texts."""

else:
    ChoiceParameters = _with_parameters(SamplingFields, "ChoiceParameters", Place.CHOICES)


class ChoiceFields(ChoiceParameters, kw_only=True, forbid_unknown_fields=True):
    """How many texts are written, what they are held to, how they are found, and what is told of their tokens."""

    use_beam_search: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None


PASSED: Final = tuple(name for name in ("stop", *_names(Place.DRAW, Place.TEXT, Place.CHOICES)) if name != "logit_bias")
"""Fields whose names and values are those of `SamplingParams`."""


def sampling_of(fields: SamplingFields, defaults: SamplingParams, **changes: Any) -> SamplingParams:
    """Return the sampling parameters of a request: `changes`, then what it says, then the defaults. Does not mutate.

    >>> fields = msgspec.convert({"n": 2, "logit_bias": {"7": 1.0}}, ChoiceFields)
    >>> sampling_of(fields, SamplingParams(temperature=0.6), max_tokens=16)
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
