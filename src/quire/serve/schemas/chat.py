"""POST /v1/chat/completions: what comes in, what goes out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.schemas.common import ContentLogprob, FinishReason, PromptLogprobs, Usage
from quire.serve.schemas.sampling import ChoiceFields, LogprobCount, TokenCount

ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatRequest(ChoiceFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation, to be answered."""

    messages: list[dict[str, Any]]
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """The function that is called, and its arguments as the JSON text that the model wrote."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True):
    """An answer. Where there may be calls or reasoning, it may have no text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function, which comes once, and a piece of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a call; its id and its type come once."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True):
    """What is new of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    """How likely the tokens of an answer were."""

    content: list[ContentLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer of several."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """What is new of one answer of several."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer to a call."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
