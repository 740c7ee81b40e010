"""The parts that requests and answers of several endpoints share."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from quire.core.validate import MAX_NAME_LENGTH


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens had their keys and values in the cache.

    `by_tier`: how many of those were on the device, and how many were loaded from host memory or disk for this request;
    absent if none were loaded.
    """

    cached_tokens: int
    by_tier: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True):
    """The tokens of a request: of all its prompts and all its texts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token's log-probability; `bytes` is None if the server has no tokenizer."""

    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct, frozen=True):
    """The log-probability of a token of the text, and the likeliest tokens at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class PromptLogprob(msgspec.Struct, frozen=True):
    """The log-probability of a token of the prompt, in vLLM's form."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of a prompt: that token and the likeliest ones, by token id; None for the first token."""

FinishReason = Literal["stop", "length"]


class ModelFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The field of every request: its model. None: the first served model."""

    has_batch: ClassVar[bool] = False  # one body can have several prompts with several texts
    most_prompts: ClassVar[int] = 1  # in bodies without a batch
    has_text: ClassVar[bool] = True
    any_media_type: ClassVar[bool] = False  # accept a JSON body with another Content-Type
    paths: ClassVar[tuple[str, ...]] = ()  # of nested fields, to suggest for an unknown field

    model: Annotated[str, msgspec.Meta(max_length=MAX_NAME_LENGTH)] | None = None


class StreamFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """The field of every request for text: whether to stream the answer."""

    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"

    stream: bool | None = None
