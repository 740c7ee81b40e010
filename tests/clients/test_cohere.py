"""Cohere's library for Python, with its second interface: documents in order, vectors of texts."""

from __future__ import annotations

import base64
import struct

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


def test_vectors_of_all_types(client: cohere.ClientV2) -> None:
    types = ["float", "base64", "int8", "uint8", "binary", "ubinary"]
    found = client.embed(model="guide", input_type="search_document", texts=DOCUMENTS, embedding_types=types)
    vectors = found.embeddings
    assert found.texts == DOCUMENTS and found.meta.billed_units.input_tokens > 10
    for place, numbers in enumerate(vectors.float_):
        assert struct.unpack(f"<{len(numbers)}f", base64.b64decode(vectors.base64[place])) == tuple(numbers)
        assert [number + 128 for number in vectors.int8[place]] == vectors.uint8[place]
        assert len(numbers) == len(vectors.int8[place]) == 8 * len(vectors.binary[place])
        bits = "".join(f"{each:08b}" for each in vectors.ubinary[place])
        assert bits == "".join("1" if number > 0 else "0" for number in numbers)
        assert [number + 128 for number in vectors.binary[place]] == vectors.ubinary[place]


def test_a_text_has_one_vector_however_it_comes(client: cohere.ClientV2) -> None:
    together = client.embed(model="guide", input_type="clustering", texts=DOCUMENTS).embeddings.float_
    for text, vector in zip(DOCUMENTS, together, strict=True):
        inputs = [{"content": [{"type": "text", "text": text}]}]
        alone = client.embed(model="guide", input_type="search_query", inputs=inputs, embedding_types=["float"])
        assert alone.embeddings.float_ == [vector] and alone.embeddings.int8 is None
    cut = client.embed(model="guide", input_type="clustering", texts=DOCUMENTS, output_dimension=16)
    assert [len(vector) for vector in cut.embeddings.float_] == [16] * 3


def test_a_vector_that_cannot_be_is_refused(client: cohere.ClientV2) -> None:
    with pytest.raises(cohere.errors.BadRequestError, match="texts"):
        client.embed(model="guide", input_type="clustering", texts=["word " * 9000], truncate="NONE")
    with pytest.raises(cohere.errors.BadRequestError, match="images"):
        client.embed(model="guide", input_type="image", images=["data:image/png;base64,AAAA"])
