"""OpenAI's library for Python: sync, async, streams, helpers, responses, retries."""

from __future__ import annotations

import asyncio

import openai
import pytest

MESSAGES = [{"role": "user", "content": "What is a block table?"}]
LIMITS = {"temperature": 0, "max_completion_tokens": 64}  # enough: helpers refuse an answer that was cut


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


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["guide"]
    assert client.models.retrieve("guide").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")
