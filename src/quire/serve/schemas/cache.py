"""/cache/warm, /cache/export and /cache/import: operators keep, export and import prompts' blocks."""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import msgspec

from quire.serve.schemas.common import ModelFields

MAX_PROMPTS: Final = 128
"""Maximum prompts per request."""


class CachePromptFields(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """Prompts, or one conversation, in the scope of the caller's key and of `cache_salt`."""

    prompt: str | list[Any] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: int | None = None


class CacheWarmRequest(CachePromptFields, kw_only=True, forbid_unknown_fields=True):
    """Prompts to compute, or to load, and to keep."""

    most_prompts: ClassVar[int] = MAX_PROMPTS


class CacheExportRequest(CachePromptFields, kw_only=True, forbid_unknown_fields=True):
    """One prompt whose blocks to export as a bundle."""


class WarmPrompt(msgspec.Struct, frozen=True):
    """A prompt: how many of its tokens were cached before, are cached now, and are on disk; null without a disk cache.

    `replica`: the number of the engine that holds them.
    """

    index: int
    prompt_tokens: int
    cached_tokens_before: int
    cached_tokens: int
    stored_tokens: int | None
    replica: int


class CacheWarmAnswer(msgspec.Struct, frozen=True):
    """The prompts, in order."""

    object: Literal["list"]
    model: str
    data: list[WarmPrompt]


class CacheImportAnswer(msgspec.Struct, frozen=True):
    """The counts of a bundle's blocks: added, already on disk, or left out for lack of room.

    `replicas`: how many engines imported the bundle. `known` is the minimum over them, `left_out` the maximum.
    """

    model: str
    blocks: int
    added: int
    known: int
    left_out: int
    replicas: int
