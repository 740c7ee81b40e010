"""litellm: as a proxy or a program that may talk to many services would ask; Jina, which has no library, among them."""

from __future__ import annotations

import os
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import litellm

MESSAGES = [{"role": "user", "content": "What is a block table?"}]


class Part(BaseModel):
    kind: Literal["block", "table"]
    count: int = Field(ge=0, le=99)


def request_to(provider: str, base_url: str, **parameters: Any) -> dict[str, Any]:
    """What a program asks whose text must come out the same twice."""
    known = {"model": f"{provider}/guide", "api_base": base_url, "api_key": "none", "messages": MESSAGES}
    return known | {"temperature": 0} | parameters


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_answers_as_classes(provider: str, base_url: str) -> None:
    wanted = request_to(provider, base_url, response_format=Part)
    text = litellm.completion(**wanted).choices[0].message.content
    assert Part.model_validate_json(text)
    chunks = list(litellm.completion(**wanted, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_answers_and_streams_agree(provider: str, base_url: str) -> None:
    wanted = request_to(provider, base_url, max_tokens=24)
    answer = litellm.completion(**wanted)
    text = answer.choices[0].message.content
    assert text
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    usage = next(chunk.usage for chunk in chunks if getattr(chunk, "usage", None))
    assert usage.completion_tokens == answer.usage.completion_tokens


def test_errors_are_told_apart(base_url: str) -> None:
    with pytest.raises(litellm.exceptions.ContextWindowExceededError):
        litellm.completion(**request_to("openai", base_url, max_tokens=1_000_000))


@pytest.mark.parametrize("provider", ["cohere", "hosted_vllm", "jina_ai"])
def test_documents_are_put_in_order(provider: str, server: str) -> None:
    """As each service calls its paths and fields."""
    documents = ["Rivers flow to the sea.", "What is a block table?", "It maps the blocks of a sequence."]
    base = f"{server}/v2/rerank" if provider == "cohere" else f"{server}/v1/rerank"
    found = litellm.rerank(
        model=f"{provider}/guide",
        query="What is a block table?",
        documents=documents,
        top_n=2,
        api_base=base,
        api_key="none",
    )
    assert found.results[0]["index"] == 1 and len(found.results) == 2
    assert found.results[0]["relevance_score"] > found.results[1]["relevance_score"]


@pytest.mark.parametrize("provider", ["hosted_vllm", "jina_ai"])
def test_vectors_are_the_same_alone_and_together(provider: str, base_url: str) -> None:
    wanted = {"model": f"{provider}/guide", "api_base": base_url, "api_key": "none"}
    texts = ["What is a block table?", "A mat."]
    together = [each["embedding"] for each in litellm.embedding(input=texts, **wanted).data]
    assert together == [litellm.embedding(input=[text], **wanted).data[0]["embedding"] for text in texts]
    assert len(litellm.embedding(input=texts[:1], dimensions=8, **wanted).data[0]["embedding"]) == 8
