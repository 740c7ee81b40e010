"""langchain-openai: chat models in chains, in batches, in streams."""

from __future__ import annotations

from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI
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
