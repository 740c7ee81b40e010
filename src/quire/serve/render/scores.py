"""The answers with scores, ranked documents, or labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from quire.core.pooling import vector_numbers
from quire.engine.text.scores import cosine, first_share, ranked
from quire.serve.render.answer import shown_id, shown_model
from quire.serve.run.generation import Generation
from quire.serve.schemas.scores import (
    ApiVersion,
    BilledUnits,
    Classified,
    ClassifyAnswer,
    ClassifyRequest,
    CohereMeta,
    CohereRerankAnswer,
    CohereTokens,
    Document,
    Pairs,
    RankedDocument,
    RerankAnswer,
    RerankRequest,
    Score,
    ScoreAnswer,
    ScoreRequest,
    TextUsage,
)

COHERE: Final = ApiVersion("2")
DOCUMENTS_PER_UNIT: Final = 100


def score_answer(fields: ScoreRequest, generation: Generation, vectors: Sequence[bytes]) -> ScoreAnswer:
    """Return the answer of /score. Does not mutate."""
    scores = _scores(fields.pairs(), generation, vectors)
    data = [Score(index, "score", score) for index, score in enumerate(scores)]
    made, name = generation.created_s, shown_model(fields, generation)
    return ScoreAnswer(shown_id("score-", generation.context), "list", made, name, data, _usage(generation))


def rerank_answer(fields: RerankRequest, generation: Generation, vectors: Sequence[bytes]) -> RerankAnswer:
    """Return the answer of /rerank. Does not mutate."""
    results = _ranked_documents(fields, generation, vectors, has_texts=fields.return_documents is not False)
    name = shown_model(fields, generation)
    return RerankAnswer(shown_id("rerank-", generation.context), name, results, _usage(generation))


def cohere_rerank_answer(fields: RerankRequest, generation: Generation, vectors: Sequence[bytes]) -> CohereRerankAnswer:
    """Return the answer of /v2/rerank. Does not mutate."""
    results = _ranked_documents(fields, generation, vectors, has_texts=fields.return_documents is True)
    units = BilledUnits(-(-len(fields.documents) // DOCUMENTS_PER_UNIT))
    meta = CohereMeta(COHERE, units, CohereTokens(generation.counts.prompt))
    return CohereRerankAnswer(shown_id("rerank-", generation.context), results, meta)


def classify_answer(fields: ClassifyRequest, generation: Generation, vectors: Sequence[bytes]) -> ClassifyAnswer:
    """Return the answer of /classify. Does not mutate."""
    labels, data = generation.services.model.report.labels, []
    for index, vector in enumerate(vectors):
        shares = vector_numbers(vector).tolist()
        data.append(Classified(index, labels[shares.index(max(shares))], shares, len(shares)))
    made, name = generation.created_s, shown_model(fields, generation)
    return ClassifyAnswer(shown_id("classify-", generation.context), "list", made, name, data, _usage(generation))


def _ranked_documents(
    fields: RerankRequest, generation: Generation, vectors: Sequence[bytes], *, has_texts: bool
) -> list[RankedDocument]:
    texts = fields.texts()
    scores = _scores([(fields.query, text) for text in texts], generation, vectors)
    return [
        RankedDocument(place, scores[place], Document(texts[place]) if has_texts else None)
        for place in ranked(scores, fields.top_n)
    ]


def _scores(pairs: Pairs, generation: Generation, vectors: Sequence[bytes]) -> list[float]:
    """Return the score of each pair, from a vector for each pair or for each text. Does not mutate."""
    if generation.services.model.report.labels:
        return [first_share(vector) for vector in vectors]
    places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
    return [cosine(vectors[places[one]], vectors[places[other]]) for one, other in pairs]


def _usage(generation: Generation) -> TextUsage:
    return TextUsage(generation.counts.prompt, generation.counts.prompt)
