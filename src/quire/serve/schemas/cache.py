"""/cache/warm, /cache/export and /cache/import: what operators have the cache keep, give away and take in."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import msgspec

from quire.serve.schemas.common import ModelFields

MAX_PROMPTS: Final = 128
"""The most prompts of a call."""


class CachePromptFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """Prompts, or one conversation, in the scope of the caller's key and of `cache_salt`."""

    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None


class CacheWarmRequest(CachePromptFields, kw_only=True, forbid_unknown_fields=True):
    """Prompts to compute, or to load, and to keep."""

    most_prompts: ClassVar[int] = MAX_PROMPTS


class CacheExportRequest(CachePromptFields, kw_only=True, forbid_unknown_fields=True):
    """One prompt whose blocks are wanted as a bundle."""


class WarmPrompt(msgspec.Struct, frozen=True):
    """A prompt: how many of its tokens were cached before, are now, and are on disk; null: there is no disk cache.

    `replica`: the engine that holds them.
    """

    index: int
    prompt_tokens: int
    cached_tokens_before: int
    cached_tokens: int
    stored_tokens: int | None
    replica: int


class CacheWarmAnswer(msgspec.Struct, frozen=True):
    """The prompts, in their order."""

    object: Literal["list"]
    model: str
    data: list[WarmPrompt]


class CacheImportAnswer(msgspec.Struct, frozen=True):
    """What became of the blocks of a bundle: taken in, on disk before, or left out for lack of room.

    `replicas`: how many engines took it in. Of several, `known` is the least of any and `left_out` the most.
    """

    model: str
    blocks: int
    added: int
    known: int
    left_out: int
    replicas: int
