"""Cohere's library for Python: documents in order, with its second interface."""

from __future__ import annotations

import cohere
import pytest

QUERY = "What is a block table?"
DOCUMENTS = ["Rivers flow to the sea.", "What is a block table?", "It maps the blocks of a sequence."]


@pytest.fixture(scope="module")
def client(server: str) -> cohere.ClientV2:
    return cohere.ClientV2(api_key="none", base_url=server)


def test_documents_are_put_in_order(client: cohere.ClientV2) -> None:
    found = client.rerank(model="guide", query=QUERY, documents=DOCUMENTS)
    scores = [each.relevance_score for each in found.results]
    assert found.results[0].index == 1 and scores == sorted(scores, reverse=True) and len(set(scores)) == 3
    assert found.id and found.meta.billed_units.search_units == 1 and found.meta.tokens.input_tokens > 10
    (best,) = client.rerank(model="guide", query=QUERY, documents=DOCUMENTS, top_n=1).results
    assert best == found.results[0]


def test_errors_are_told_apart(client: cohere.ClientV2) -> None:
    with pytest.raises(cohere.errors.BadRequestError, match="documents"):
        client.rerank(model="guide", query=QUERY, documents=[])
    with pytest.raises(cohere.errors.NotFoundError):
        client.rerank(model="nobody", query=QUERY, documents=DOCUMENTS)
