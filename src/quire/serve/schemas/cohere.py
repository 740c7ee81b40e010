"""POST /v2/embed, as Cohere defines it: its requests and answers. Cohere's /v2/rerank is in `scores`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from quire.core.errors import InvalidRequestError
from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.embeddings import MAX_INPUTS, Dimensions
from quire.serve.schemas.scores import ApiVersion, CohereTokens

InputType = Literal["search_document", "search_query", "classification", "clustering"]
EmbeddingType = Literal["float", "base64", "int8", "uint8", "binary", "ubinary"]


class CohereText(msgspec.Struct, forbid_unknown_fields=True):
    """A part of an input. Of Cohere's kinds, only text is supported."""

    type: Literal["text"]
    text: str


class CohereInput(msgspec.Struct, forbid_unknown_fields=True):
    """An input in parts, which become lines of one text."""

    content: Annotated[list[CohereText], Meta(min_length=1)]


class CohereEmbedRequest(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """Texts to turn into vectors of one or more types. By default, the end of a too long text is cut off."""

    most_prompts: ClassVar[int] = MAX_INPUTS

    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    input_type: InputType | None = None
    embedding_types: Annotated[list[EmbeddingType], Meta(min_length=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    output_dimension: Dimensions | None = None
    cache_salt: str | None = None
    priority: int | None = None

    @property
    def place(self) -> str:
        """The field with the texts; raises `InvalidRequestError` unless exactly one field has texts."""
        if (self.texts is None) == (self.inputs is None):
            found = "neither texts nor inputs" if self.texts is None else "both texts and inputs"
            raise InvalidRequestError("texts", found, "one of the two")
        return "inputs" if self.texts is None else "texts"

    def all_texts(self) -> list[str]:
        """Return the texts, in order; the parts of an input are its lines. Does not mutate."""
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in each.content) for each in self.inputs or ()]

    def types(self) -> Sequence[EmbeddingType]:
        """Return the types of vectors, each once. Does not mutate."""
        return list(dict.fromkeys(self.embedding_types or ("float",)))


class CohereVectors(msgspec.Struct, frozen=True, rename={"floats": "float"}):
    """The vectors by type, in the order of the texts; types that were not requested are absent."""

    floats: list[list[float]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET


class CohereEmbedMeta(msgspec.Struct, frozen=True):
    """The counts of a request."""

    api_version: ApiVersion
    billed_units: CohereTokens
    tokens: CohereTokens


class CohereEmbedAnswer(msgspec.Struct, frozen=True):
    """The vectors, and the texts as received."""

    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereEmbedMeta
    response_type: Literal["embeddings_by_type"]
