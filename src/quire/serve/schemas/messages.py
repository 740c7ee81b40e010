"""Anthropic's API, /v1/messages and /v1/messages/count_tokens: its requests, answers and stream events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from quire.core.sampling_params import MAX_INT32, MAX_STOP_STRINGS
from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.sampling import SamplingFields, StopString, at_most

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class WantedTool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which tools the model may or must call; `name` is for the type "tool"."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model reasons before it answers. `budget_tokens` and `display` are accepted and change nothing."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class SchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON schema of the text of an answer."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the text of an answer, and the effort, for models whose chat template uses it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: SchemaFormat | None = None


class MessagesRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer. `stop_sequences` replaces the field `stop` of other endpoints.

    The fields from `cache_control` to `workspace_id` are for a service, and change nothing here.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_INT32)]
    stop_sequences: Annotated[list[StopString], at_most(MAX_STOP_STRINGS)] | None = None
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: WantedTool | None = None
    thinking: ThinkingWanted | None = None
    output_config: OutputWanted | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


if TYPE_CHECKING:

    class CountTokensRequest(MessagesRequest):
        """A conversation whose tokens are counted: the fields of `MessagesRequest` from `messages` on."""

else:
    _own = [each for each in msgspec.structs.fields(MessagesRequest) if each.name in MessagesRequest.__annotations__]
    CountTokensRequest = msgspec.defstruct(
        "CountTokensRequest",
        [(each.name, each.type, each.default) for each in _own if each.name not in ("max_tokens", "stop_sequences")],
        bases=(ModelFields,),
        kw_only=True,
        forbid_unknown_fields=True,
        namespace={"__doc__": "A conversation whose tokens are counted."},
    )


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """A text."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """The model's reasoning. Clients send it back with its signature, which this server does not check."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool, with its arguments."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """The tokens of a request. `input_tokens` are those that were not in the cache; filling the cache is free."""

    input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0


class MessageAnswer(msgspec.Struct, frozen=True):
    """The answer; without content and reasons at the start of a stream."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokensCounted(msgspec.Struct, frozen=True):
    """The number of tokens of a conversation."""

    input_tokens: int


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    """The new part of a text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """The new part of the reasoning."""

    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    """The signature of the reasoning, at its end."""

    signature: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """The new part of a call's arguments, as JSON text."""

    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """The new part of a block: the only event that is sent for every token."""

    index: int
    delta: Delta
