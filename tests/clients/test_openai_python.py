"""OpenAI's library for Python: sync, async, streams, helpers, responses, retries."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

MESSAGES = [{"role": "user", "content": "What is a block table?"}]
LIMITS = {"temperature": 0, "max_completion_tokens": 64}  # enough: helpers refuse an answer that was cut


class Part(BaseModel):
    kind: Literal["block", "table"]
    count: int = Field(ge=0, le=99)


class Answer(BaseModel):
    parts: list[Part] = Field(min_length=1, max_length=2)
    note: str | None = Field(max_length=8)


@pytest.fixture(scope="module")
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def test_sync_async_and_streams_agree(client: openai.OpenAI, base_url: str) -> None:
    answer = client.chat.completions.create(model="guide", messages=MESSAGES, **LIMITS)
    text = answer.choices[0].message.content
    with client.chat.completions.stream(model="guide", messages=MESSAGES, **LIMITS) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as several:
            answers = await asyncio.gather(
                *(several.chat.completions.create(model="guide", messages=MESSAGES, **LIMITS) for _ in range(8))
            )
            pieces = [
                chunk.choices[0].delta.content or ""
                async for chunk in await several.chat.completions.create(
                    model="guide", messages=MESSAGES, stream=True, **LIMITS
                )
            ]
            return [each.choices[0].message.content or "" for each in answers] + ["".join(pieces)]

    assert asyncio.run(ask()) == [text] * 9


def test_parsing_without_a_schema(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model="guide", messages=MESSAGES, **LIMITS)
    assert parsed.choices[0].message.content


def test_parsing_into_a_class(client: openai.OpenAI) -> None:
    wanted = {"model": "guide", "messages": MESSAGES, "response_format": Answer, "temperature": 0}
    parsed = client.chat.completions.parse(**wanted).choices[0].message.parsed
    assert isinstance(parsed, Answer)
    with client.chat.completions.stream(**wanted) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    asked = {"model": "guide", "input": "What is a block table?", "text_format": Answer, "temperature": 0}
    assert client.responses.parse(**asked).output_parsed == parsed
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output_parsed == parsed
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**wanted, max_completion_tokens=3)


def test_forms_of_vllm(client: openai.OpenAI) -> None:
    for form, allowed in (({"choice": ["yes", "no"]}, {"yes", "no"}), ({"regex": "[ab]"}, {"a", "b"})):
        answer = client.chat.completions.create(
            model="guide", messages=MESSAGES, extra_body={"structured_outputs": form}
        )
        assert answer.choices[0].message.content in allowed
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="guide", prompt="a", extra_body={"structured_outputs": {"regex": "("}})
    assert caught.value.param == "structured_outputs.regex"


def test_responses_and_their_streams_agree(client: openai.OpenAI) -> None:
    wanted = {"model": "guide", "input": "What is a block table?", "temperature": 0, "max_output_tokens": 64}
    text = client.responses.create(**wanted).output_text
    assert text
    with client.responses.stream(**wanted) as stream:
        assert stream.get_final_response().output_text == text


def test_log_probabilities(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="guide", messages=MESSAGES, logprobs=True, top_logprobs=3, **LIMITS)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert len(entries) == answer.usage.completion_tokens
    assert (
        b"".join(bytes(entry.bytes or []) for entry in entries).decode().startswith(answer.choices[0].message.content)
    )
    assert all(entry.top_logprobs[0].logprob >= entry.logprob for entry in entries)


def test_vectors_are_the_same_as_bytes_and_as_numbers_alone_and_together(client: openai.OpenAI) -> None:
    """The library asks for base64 unless it is told otherwise, and gives out numbers."""
    texts = ["What is a block table?", "blocks"]
    together = client.embeddings.create(model="guide", input=texts)
    vectors = [each.embedding for each in together.data]
    assert [each.index for each in together.data] == [0, 1]
    assert together.usage.prompt_tokens == together.usage.total_tokens > 1
    for text, expected in zip(texts, vectors, strict=True):
        numbers = client.embeddings.create(model="guide", input=text, encoding_format="float").data[0].embedding
        assert numbers == expected
        assert math.isclose(math.hypot(*numbers), 1, rel_tol=1e-6)
    cut = client.embeddings.create(model="guide", input=texts[0], dimensions=7).data[0].embedding
    assert len(cut) == 7
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="guide", input=texts, dimensions=1 << 20)
    assert caught.value.param == "dimensions"


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["guide"]
    assert client.models.retrieve("guide").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
