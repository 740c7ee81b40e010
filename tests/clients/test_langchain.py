"""langchain-openai: chat models in chains, in batches, in streams; vectors in a store."""

from __future__ import annotations

from typing import Literal

from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field


class Part(BaseModel):
    """A part of the memory."""

    kind: Literal["block", "table"]
    count: int = Field(ge=0, le=99)


def test_invoke_batch_and_stream_agree(base_url: str) -> None:
    model = ChatOpenAI(
        base_url=base_url, api_key="none", model="guide", temperature=0, max_tokens=24, stream_usage=True
    )
    answer = model.invoke("What is a block table?")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(model.stream("What is a block table?"))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    assert [each.content for each in model.batch(["What is a block table?"] * 4)] == [answer.content] * 4


def test_answers_as_classes(base_url: str) -> None:
    model = ChatOpenAI(base_url=base_url, api_key="none", model="guide", temperature=0)
    part = model.with_structured_output(Part, method="json_schema").invoke("What is a block table?")
    assert isinstance(part, Part)
    schema = {**Part.model_json_schema(), "additionalProperties": False}
    assert model.with_structured_output(schema, method="json_schema").invoke("What is a block table?") == dict(part)


def test_completions(base_url: str) -> None:
    model = OpenAI(base_url=base_url, api_key="none", model="guide", temperature=0, max_tokens=8)
    assert model.invoke("The memory") == model.generate(["The memory"]).generations[0][0].text


def test_vectors_are_the_same_alone_and_together_and_find_a_text(base_url: str) -> None:
    """The library sends token ids of OpenAI's own models, unless it is told not to: other models have other ids."""
    model = OpenAIEmbeddings(base_url=base_url, api_key="none", model="guide", check_embedding_ctx_length=False)
    texts = ["What is a block table?", "Rivers flow to the sea.", "A mat."]
    vectors = model.embed_documents(texts)
    assert vectors == [model.embed_query(text) for text in texts]
    store = InMemoryVectorStore.from_texts(texts, model)
    assert store.similarity_search("What is a block?", k=1)[0].page_content == texts[0]
    short = OpenAIEmbeddings(
        base_url=base_url, api_key="none", model="guide", dimensions=8, check_embedding_ctx_length=False
    )
    assert len(short.embed_query(texts[0])) == 8
