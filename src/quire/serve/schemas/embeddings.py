"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings: their requests and answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from quire.serve.schemas.common import ModelFields, PromptTokensDetails
from quire.serve.schemas.ollama import OllamaModelFields, OllamaOptions

MAX_INPUTS: Final = 2048
"""Maximum texts per request: OpenAI's limit."""

Dimensions = Annotated[int, Meta(ge=1)]


class EmbeddingRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids to turn into vectors."""

    most_prompts: ClassVar[int] = MAX_INPUTS

    input: str | list[Any]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    cache_salt: str | None = None
    priority: int | None = None


class Embedding(msgspec.Struct, frozen=True):
    """A vector: its numbers, or the bytes of little-endian float32 numbers in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """The tokens of all texts, and how many of them had their keys and values in the cache."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingAnswer(msgspec.Struct, frozen=True):
    """The vectors, in the order of the texts."""

    object: Literal["list"]
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class OllamaEmbedRequest(OllamaModelFields, kw_only=True, forbid_unknown_fields=True):
    """One or several texts. With `truncate`, the default, the end of a too long text is cut off."""

    most_prompts: ClassVar[int] = MAX_INPUTS

    input: str | list[str]
    truncate: bool | None = None
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaEmbedAnswer(msgspec.Struct, frozen=True):
    """The vectors, and their time in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbeddingsRequest(OllamaModelFields, kw_only=True, forbid_unknown_fields=True):
    """One text, in the form that Ollama had before /api/embed."""

    prompt: str
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsAnswer(msgspec.Struct, frozen=True):
    """The vector."""

    embedding: list[float]
