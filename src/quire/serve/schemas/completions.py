"""POST /v1/completions: its requests and answers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from quire.serve.schemas.common import FinishReason, PromptLogprobs, Usage
from quire.serve.schemas.sampling import ChoiceFields, LogprobCount, TokenCount


class CompletionRequest(ChoiceFields, kw_only=True, forbid_unknown_fields=True):
    """One or several prompts to continue."""

    has_batch: ClassVar[bool] = True

    prompt: str | list[Any]
    suffix: str | None = None
    max_tokens: TokenCount | None = None
    max_completion_tokens: TokenCount | None = None  # some clients send both to every endpoint
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Parallel lists over tokens; with `echo`, prompt tokens come first, and the very first token has no value."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True):
    """A text, or in a stream its new part."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True):
    """The answer; in a stream, every chunk has this form, with `usage` if requested."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
