"""POST /v1/chat/completions: its requests and answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.schemas.common import ContentLogprob, FinishReason, PromptLogprobs, Usage
from quire.serve.schemas.sampling import ChoiceFields, LogprobCount, TokenCount

ChatFinishReason = FinishReason | Literal["tool_calls"]


class ChatRequest(ChoiceFields, kw_only=True, forbid_unknown_fields=True):
    """A conversation to answer."""

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
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """The called function, and its arguments as the JSON text that the model wrote."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a function."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True):
    """An answer. If it has calls or reasoning, it may have no text."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The name of a function, sent once, and a piece of its arguments."""

    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """The new part of a call; its id and type are sent once."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class ChatDelta(msgspec.Struct, frozen=True):
    """The new part of an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The log-probabilities of an answer's tokens."""

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
    """The new part of one answer of several."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer to a request."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """One event of a stream; only the first has the ids of the prompt."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
