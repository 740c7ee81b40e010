"""Anthropic's library for Python, and litellm as a client of that interface: sync, async, streams, tools, errors."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any, Literal

import anthropic
import pytest
from pydantic import BaseModel

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import litellm

MESSAGES: Any = [{"role": "user", "content": "What is a block table?"}]
LIMITS: Any = {"model": "guide", "max_tokens": 24, "extra_body": {"temperature": 0}}
ADD: Any = {
    "name": "add_numbers",
    "description": "Add two numbers",
    "input_schema": {
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in "ab"},
        "required": ["a", "b"],
    },
}


class Part(BaseModel):
    kind: Literal["block", "table"]


@pytest.fixture(scope="module")
def client(server: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_sync_async_and_streams_agree(client: anthropic.Anthropic, server: str) -> None:
    answer = client.messages.create(messages=MESSAGES, system="Be brief.", **LIMITS)
    text = text_of(answer)
    assert text and answer.id.startswith("msg_")
    assert (answer.type, answer.role, answer.model) == ("message", "assistant", "guide")
    assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 24)
    assert answer._request_id and answer._request_id.startswith("req-")
    with client.messages.stream(messages=MESSAGES, system=[{"type": "text", "text": "Be brief."}], **LIMITS) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert (text_of(final), final.stop_reason) == (text, "max_tokens")
    assert final.usage.output_tokens == 24
    total = (answer.usage.input_tokens, answer.usage.cache_read_input_tokens or 0)
    assert sum(total) == final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    counted = client.messages.count_tokens(model="guide", messages=MESSAGES, system="Be brief.")
    assert counted.input_tokens == sum(total)

    async def ask() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server, auth_token="none") as several:
            wanted = {"messages": MESSAGES, "system": "Be brief.", **LIMITS}
            answers = await asyncio.gather(*(several.messages.create(**wanted) for _ in range(8)))
            async with several.messages.stream(**wanted) as stream:
                pieces = [piece async for piece in stream.text_stream]
            return [text_of(each) for each in answers] + ["".join(pieces)]

    assert asyncio.run(ask()) == [text] * 9


def test_a_stop_sequence_ends_a_text(client: anthropic.Anthropic) -> None:
    answer = client.messages.create(messages=MESSAGES, stop_sequences=["table"], **LIMITS)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "table")
    assert "table" not in text_of(answer)


def test_an_answer_that_has_begun_is_continued(client: anthropic.Anthropic) -> None:
    text = text_of(client.messages.create(messages=MESSAGES, **LIMITS))
    begun = [*MESSAGES, {"role": "assistant", "content": text[:20]}]
    with client.messages.stream(messages=begun, **LIMITS) as stream:
        assert (text[:20] + "".join(stream.text_stream)).startswith(text)


def test_an_answer_becomes_a_class(client: anthropic.Anthropic) -> None:
    wanted = {"messages": MESSAGES, "output_format": Part, **LIMITS, "max_tokens": 64}
    parsed = client.messages.parse(**wanted).parsed_output
    assert isinstance(parsed, Part)
    with client.messages.stream(**wanted) as stream:
        assert stream.get_final_message().parsed_output == parsed


def test_a_function_is_called_and_answered(client: anthropic.Anthropic) -> None:
    """The built-in model knows no function, but it can be made to call one."""
    wanted: Any = {"model": "guide", "messages": MESSAGES, "tools": [ADD], "max_tokens": 400}
    wanted |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**wanted)
    assert answer.stop_reason == "tool_use"
    [call] = answer.content
    assert call.type == "tool_use" and call.name == "add_numbers" and call.input.keys() == {"a", "b"}
    with client.messages.stream(**wanted) as stream:
        pieces = "".join(event.partial_json for event in stream if event.type == "input_json")
        [streamed] = stream.get_final_message().content
    assert json.loads(pieces) == streamed.input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
    told = [*MESSAGES, answer.to_param(), {"role": "user", "content": [result]}]
    last = client.messages.create(model="guide", messages=told, tools=[ADD], max_tokens=1)
    assert last.usage.output_tokens == 1


def test_errors_have_their_classes(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="model 'nobody' not found") as missing:
        client.messages.create(messages=MESSAGES, **(LIMITS | {"model": "nobody"}))
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id and missing.value.request_id.startswith("req-")
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.content\[0\]\.image is not supported"):
        client.messages.create(messages=[{"role": "user", "content": [image]}], **LIMITS)
    long = [{"role": "user", "content": "block " * 4000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum; "):
        client.messages.create(messages=long, **LIMITS)
    assert client.messages.count_tokens(model="guide", messages=long).input_tokens > 4000


def test_a_stream_that_is_left_ends(client: anthropic.Anthropic) -> None:
    wanted = LIMITS | {"max_tokens": 1900, "extra_body": {"ignore_eos": True}}
    with client.messages.stream(messages=MESSAGES, **wanted) as stream:
        assert next(stream.text_stream)
    assert text_of(client.messages.create(messages=MESSAGES, **LIMITS))


def test_litellm_reads_the_same(client: anthropic.Anthropic, server: str) -> None:
    text = text_of(client.messages.create(messages=MESSAGES, **LIMITS))
    wanted: Any = {"model": "anthropic/guide", "api_base": server, "api_key": "none", "messages": MESSAGES}
    wanted |= {"temperature": 0, "max_tokens": 24}
    answer = litellm.completion(**wanted)
    assert (answer.choices[0].message.content, answer.usage.completion_tokens) == (text, 24)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**wanted, stream=True)))
    assert streamed.choices[0].message.content == text
