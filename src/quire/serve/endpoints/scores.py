"""POST /score, /rerank and /classify: score pairs of texts, rank documents, or classify texts."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from quire.serve.endpoints.embeddings import answer_vectors
from quire.serve.render.scores import classify_answer, cohere_rerank_answer, rerank_answer, score_answer
from quire.serve.schemas.scores import (
    CLASSIFY_PATHS,
    COHERE_PATHS,
    RERANK_PATHS,
    SCORE_PATHS,
    ClassifyRequest,
    CohereRerankRequest,
    RerankRequest,
    ScoreRequest,
)
from quire.serve.translate.scores import classify_request, cohere_rerank_request, rerank_request, score_request


async def score(request: Request) -> Response:
    """Answer as vLLM does."""
    return await answer_vectors(request, ScoreRequest, score_request, score_answer)


async def rerank(request: Request) -> Response:
    """Answer as Jina and vLLM do."""
    return await answer_vectors(request, RerankRequest, rerank_request, rerank_answer)


async def cohere_rerank(request: Request) -> Response:
    """Answer as Cohere does."""
    return await answer_vectors(request, CohereRerankRequest, cohere_rerank_request, cohere_rerank_answer)


async def classify(request: Request) -> Response:
    """Answer as vLLM does."""
    return await answer_vectors(request, ClassifyRequest, classify_request, classify_answer)


SCORE_ROUTES: Final = tuple(
    Route(path, endpoint, methods=["POST"])
    for paths, endpoint in (
        (SCORE_PATHS, score),
        (RERANK_PATHS, rerank),
        (COHERE_PATHS, cohere_rerank),
        (CLASSIFY_PATHS, classify),
    )
    for path in paths
)
