"""/tokenize, /detokenize and /v1/models, as vLLM defines them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.sampling import TokenId


class TokenizeRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """A text or a conversation to tokenize."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """The token ids, and their texts if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """Token ids to turn into text."""

    has_text: ClassVar[bool] = False

    tokens: list[TokenId]


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text."""

    prompt: str


class ModelCard(msgspec.Struct, frozen=True):
    """A served model. `state`: ready, unloaded, starting, restarting, and so on."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    state: str


class ModelList(msgspec.Struct, frozen=True):
    """The served models."""

    object: Literal["list"]
    data: list[ModelCard]
