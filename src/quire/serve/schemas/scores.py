"""/score, /rerank and /classify, as vLLM, Jina and Cohere define them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
from msgspec import Meta

from quire.core.errors import InvalidRequestError
from quire.serve.schemas.common import ModelFields
from quire.serve.schemas.embeddings import MAX_INPUTS

SCORE_PATHS: Final = ("/score", "/v1/score")
RERANK_PATHS: Final = ("/rerank", "/v1/rerank", "/reranking", "/v1/reranking")
COHERE_PATHS: Final = ("/v2/rerank",)
CLASSIFY_PATHS: Final = ("/classify", "/v1/classify")
Ranked = Annotated[int, Meta(ge=1)]
Pairs = Sequence[tuple[str, str]]
DOCUMENT_FIELDS: Final = frozenset({"text"})


class _Texts(ModelFields, kw_only=True, forbid_unknown_fields=True):
    """The fields of requests about several texts. A too long text is refused, or cut to `truncate_prompt_tokens`."""

    most_prompts: ClassVar[int] = MAX_INPUTS

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None


class ScoreRequest(_Texts, kw_only=True, forbid_unknown_fields=True):
    """Pairs of texts: one text with each of the other side, or equally many on both sides."""

    text_1: str | list[str]
    text_2: str | list[str]
    instruction: str | None = None

    def pairs(self) -> Pairs:
        """Return the pairs; raises `InvalidRequestError` if the sides do not match. Does not mutate."""
        ones, others = ([side] if isinstance(side, str) else side for side in (self.text_1, self.text_2))
        if len(ones) != len(others) and 1 not in (len(ones), len(others)):
            raise InvalidRequestError("text_2", f"{len(others)} texts", f"one, or {len(ones)} as in text_1")
        count = max(len(ones), len(others)) if ones and others else 0
        return list(zip(ones * (count // max(len(ones), 1)), others * (count // max(len(others), 1)), strict=True))

    def place(self, index: int, side: int) -> str:
        """Return the name of a text of a pair, for errors; `side` is 0 or 1. Does not mutate."""
        name, texts = (("text_1", self.text_1), ("text_2", self.text_2))[side]
        return name if isinstance(texts, str) else f"{name}[{index if len(texts) > 1 else 0}]"


class Score(msgspec.Struct, frozen=True):
    """How well the texts of a pair match."""

    index: int
    object: Literal["score"]
    score: float


class TextUsage(msgspec.Struct, frozen=True):
    """The tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class ScoreAnswer(msgspec.Struct, frozen=True):
    """The scores, in the order of the pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: TextUsage


class RerankRequest(_Texts, kw_only=True, forbid_unknown_fields=True):
    """A query, and documents to rank: texts, or objects with a `text`."""

    query: str
    documents: list[Any]
    top_n: Ranked | None = None
    return_documents: bool | None = None
    instruction: str | None = None

    def texts(self) -> list[str]:
        """Return the texts of the documents; raises `InvalidRequestError` for any that has no text. Does not mutate."""
        texts = []
        for index, each in enumerate(self.documents):
            text: Any = each["text"] if isinstance(each, dict) and each.keys() == DOCUMENT_FIELDS else each
            if not isinstance(text, str) or not text:
                raise InvalidRequestError(f"documents[{index}]", each, "a text, or an object with a text")
            texts.append(text)
        return texts

    def place(self, index: int, side: int) -> str:
        """Return the name of a text of a pair, for errors: the query, which is `side` 0, or a document. Pure."""
        return f"documents[{index}]" if side else "query"


class CohereRerankRequest(RerankRequest, kw_only=True, forbid_unknown_fields=True):
    """The same in Cohere's form: a too long text loses its end."""

    max_tokens_per_doc: Ranked | None = None


class Document(msgspec.Struct, frozen=True):
    """A document, as received."""

    text: str


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """A document, by its index in the request, and how well it answers the query."""

    index: int
    relevance_score: float
    document: Document | None = None


class RerankAnswer(msgspec.Struct, frozen=True):
    """The documents, best first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: TextUsage


class ApiVersion(msgspec.Struct, frozen=True):
    """The version of Cohere's API."""

    version: str


class BilledUnits(msgspec.Struct, frozen=True):
    """Cohere's billing units: a query with up to 100 documents is one unit."""

    search_units: int


class CohereTokens(msgspec.Struct, frozen=True):
    """The tokens of all texts, in Cohere's form."""

    input_tokens: int


class CohereMeta(msgspec.Struct, frozen=True):
    """The counts of a request."""

    api_version: ApiVersion
    billed_units: BilledUnits
    tokens: CohereTokens


class CohereRerankAnswer(msgspec.Struct, frozen=True):
    """The documents, best first, in the form of Cohere's API version 2: without their texts unless requested."""

    id: str
    results: list[RankedDocument]
    meta: CohereMeta


class ClassifyRequest(_Texts, kw_only=True, forbid_unknown_fields=True):
    """Texts or token ids to classify."""

    input: str | list[Any]
    add_special_tokens: bool | None = None


class Classified(msgspec.Struct, frozen=True):
    """The likeliest label of a text, and the probability of each label."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyAnswer(msgspec.Struct, frozen=True):
    """The labels, in the order of the texts."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: TextUsage
