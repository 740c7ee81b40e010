"""The sampling fields of all endpoints that generate text.

Types are checked when a body is parsed. Values are checked only by `quire.core.validate`, as for the Python API. Most
fields are generated from the declarations in `quire.core.sampling_params`, with ranges for the OpenAPI document.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from quire.core.parameters import Biases, Choice, Integer, Kind, Number, Place, Switch, Texts, TokenIds
from quire.core.sampling_params import (
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_STOP_STRING_LENGTH,
    MAX_STOP_STRINGS,
    PARAMETERS,
)
from quire.core.validate import MAX_NAME_LENGTH, MAX_PRIORITY, MAX_SALT_LENGTH
from quire.serve.schemas.common import StreamFields
from quire.serve.schemas.formats import ResponseFormat, StructuredOutputs

TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def within(low: float, high: float) -> Meta:
    """Return the range of a number, for the OpenAPI document."""
    return Meta(extra_json_schema={"minimum": low, "maximum": high})


def at_most(count: int | None) -> Meta:
    """Return the maximum length of a list, for the OpenAPI document; None: any length."""
    return Meta(extra_json_schema={} if count is None else {"maxItems": count})


LogprobCount = Annotated[int, within(0, MAX_LOGPROBS)]
TokenCount = Annotated[int, within(0, MAX_INT32)]
TokenId = Annotated[int, within(0, MAX_INT32)]
ShownId = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_LENGTH)]
CacheSalt = Annotated[str, Meta(min_length=1, max_length=MAX_SALT_LENGTH)]
StopString = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": MAX_STOP_STRING_LENGTH})]


def _field_type(kind: Kind) -> Any:
    """Return the type of a parameter's field."""
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
            token_id = Annotated[str, Meta(extra_json_schema={"pattern": f"^({TOKEN_ID.pattern})$"})]
            return Annotated[dict[token_id, float], Meta(extra_json_schema={"maxProperties": kind.most})]
    raise TypeError(f"no field type for a {type(kind).__name__}")


def names_in(*places: Place) -> tuple[str, ...]:
    """Return the names of the parameters declared for these places."""
    return tuple(name for name, declared in PARAMETERS.items() if declared.place in places)


def _with_parameters(base: type[msgspec.Struct], name: str, *places: Place) -> type[msgspec.Struct]:
    """Return a struct that also has the parameters of these places as fields; None: not set."""
    fields = [
        (each, Annotated[_field_type(PARAMETERS[each].kind) | None, Meta(description=PARAMETERS[each].help)], None)
        for each in names_in(*places)
    ]
    return msgspec.defstruct(name, fields, bases=(base,), kw_only=True, forbid_unknown_fields=True)


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream reports in addition to the text. `include_obfuscation` is accepted and ignored."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


if TYPE_CHECKING:

    class TextParameters(StreamFields):
        """The parameters of every endpoint."""

        def __getattr__(self, name: str) -> Any: ...

else:
    TextParameters = _with_parameters(StreamFields, "TextParameters", Place.DRAW, Place.TEXT)


class SamplingFields(TextParameters, kw_only=True, forbid_unknown_fields=True):
    """The fields of sampling. A field that is not set has the value that the model's makers recommend."""

    stop: StopString | Annotated[list[StopString], at_most(MAX_STOP_STRINGS)] | None = None
    priority: Annotated[int, within(-MAX_PRIORITY, MAX_PRIORITY)] | None = None
    cache_salt: CacheSalt | None = None
    request_id: ShownId | None = None
    truncate_prompt_tokens: Annotated[int, Meta(extra_json_schema={"minimum": -1})] | None = None
    truncation_side: Literal["left", "right"] | None = None


if TYPE_CHECKING:

    class ChoiceParameters(SamplingFields):
        """The parameters of endpoints that generate several texts."""

else:
    ChoiceParameters = _with_parameters(SamplingFields, "ChoiceParameters", Place.CHOICES)


class ChoiceFields(ChoiceParameters, kw_only=True, forbid_unknown_fields=True):
    """The fields for several texts, for constraints on them, for beam search, and for reports about their tokens."""

    use_beam_search: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
