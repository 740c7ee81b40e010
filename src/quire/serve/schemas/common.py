"""What answers of several endpoints have in common."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from quire.core.validate import MAX_NAME_LENGTH


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Of the tokens of prompts: how many had their keys and values in the cache.

    `by_tier`: how many of those were on the device, and how many came from the host or from disk for this call; absent
    if none did.
    """

    cached_tokens: int
    by_tier: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True):
    """What a call has taken; all its prompts and all its texts together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(msgspec.Struct, frozen=True):
    """How likely a token was; `bytes` is None where the server has no tokenizer."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True):
    """How likely a token of the text was, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class PromptLogprob(msgspec.Struct, frozen=True):
    """How likely a token of the prompt was, as vLLM tells it."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt itself and the likeliest ones, by token id; None for the first."""

FinishReason = Literal["stop", "length"]


class ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What every call says: which model it is for. None: the first that is served."""

    has_batch: ClassVar[bool] = False  # several prompts in one body, each with a text
    most_prompts: ClassVar[int] = 1  # of other bodies
    has_text: ClassVar[bool] = True
    any_media_type: ClassVar[bool] = False  # a body may be JSON that says it is something else
    paths: ClassVar[tuple[str, ...]] = ()  # of fields within fields, to suggest for one that is not known

    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] | None = None


class StreamFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """What every call for text says: whether the answer comes in pieces."""

    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    stream: bool | None = None
