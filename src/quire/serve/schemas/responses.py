"""POST /v1/responses: its requests, answers and stream events. The server stores nothing."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from quire.serve.schemas.common import ContentLogprob
from quire.serve.schemas.formats import OutputFormat, TextFormat
from quire.serve.schemas.sampling import LogprobCount, SamplingFields, TokenCount

SEARCH: Final = "web_search"
"""The type of a tool that is left out next to functions."""

Status = Literal["completed", "incomplete", "in_progress"]


class TextWanted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The constraint on the text of an answer. `verbosity` is accepted and changes nothing."""

    format: OutputFormat | None = None
    verbosity: str | None = None


class ResponseRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """A text or a conversation to answer."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    top_logprobs: LogprobCount | None = None
    include: list[str] | None = None
    text: TextWanted | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    stream_options: dict[str, Any] | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools of a valid request, without those that are left out."""
        return [tool for tool in self.tools or [] if tool["type"] != SEARCH]

    @property
    def wanted_format(self) -> OutputFormat:
        """The constraint on the text of the answer."""
        return TextFormat() if self.text is None or self.text.format is None else self.text.format


class OutputText(msgspec.Struct, frozen=True):
    """The text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: list[str]
    logprobs: list[ContentLogprob]


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """The message of an answer."""

    id: str
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningText(msgspec.Struct, frozen=True):
    """The text of the model's reasoning."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The reasoning before an answer: complete, without a summary."""

    id: str
    status: Status
    content: list[ReasoningText]
    summary: list[str] = []


class FunctionCallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call of a function, with its arguments as the JSON text that the model wrote."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | msgspec.UnsetType = msgspec.UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """The input tokens whose keys and values were in the cache. Writing to the cache is free."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """The output tokens of reasoning that is counted separately: always 0."""

    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    """The tokens of the request."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why an answer is incomplete."""

    reason: Literal["max_output_tokens"]


class TextSettings(msgspec.Struct, frozen=True):
    """The constraint on the text."""

    format: OutputFormat = TextFormat()


class ResponseAnswer(msgspec.Struct, frozen=True):
    """The answer, complete or in progress."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Status
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    metadata: dict[str, str]
    error: None = None
    parallel_tool_calls: bool = False
    previous_response_id: None = None
    store: bool = False
    text: TextSettings = TextSettings()
    tool_choice: str | dict[str, Any] = "none"
    tools: list[dict[str, Any]] = []
    truncation: str = "disabled"


class TextDelta(msgspec.Struct, frozen=True):
    """The new part of the text: the only event that is sent for every token."""

    type: Literal["response.output_text.delta"]
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ContentLogprob]
