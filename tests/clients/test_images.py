"""Images, as the libraries of OpenAI, Anthropic, Ollama and LangChain send them: all get the same answer."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
from langchain_core.messages import HumanMessage
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

TEXT = "What is this?"
MODEL = "eye"


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


HEADER = struct.pack(">IIBBBBB", 48, 32, 8, 0, 0, 0, 0)
ROWS = b"".join(bytes([0, *range(row, row + 48)]) for row in range(32))
PNG = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", HEADER) + _chunk(b"IDAT", zlib.compress(ROWS)) + _chunk(b"IEND", b"")
DATA = base64.b64encode(PNG).decode()
URL = f"data:image/png;base64,{DATA}"


@pytest.fixture(scope="module")
def expected(image_server: str) -> str:
    """The answer to a chat completion."""
    content: Any = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": TEXT}]
    client = openai.OpenAI(base_url=f"{image_server}/v1", api_key="none")
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=6, temperature=0
    )
    assert answer.usage is not None and answer.usage.prompt_tokens > 40, "the image has tokens"
    return answer.choices[0].message.content or ""


def test_openai_responses(image_server: str, expected: str) -> None:
    client = openai.OpenAI(base_url=f"{image_server}/v1", api_key="none")
    content: Any = [
        {"type": "input_image", "image_url": URL, "detail": "auto"},
        {"type": "input_text", "text": TEXT},
    ]
    given: Any = [{"role": "user", "content": content}]
    answer = client.responses.create(model=MODEL, input=given, max_output_tokens=6, temperature=0)
    assert answer.output_text == expected


def test_anthropic(image_server: str, expected: str) -> None:
    client = anthropic.Anthropic(base_url=image_server, api_key="none")
    source: Any = {"type": "base64", "media_type": "image/png", "data": DATA}
    content: Any = [{"type": "image", "source": source}, {"type": "text", "text": TEXT}]
    given: Any = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    answer = client.messages.create(**given, max_tokens=6, extra_body={"temperature": 0})
    assert "".join(block.text for block in answer.content if block.type == "text") == expected
    counted = client.messages.count_tokens(**given).input_tokens
    assert counted == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    content[0]["source"] = {"type": "url", "url": "https://example.org/cat.png"}
    with pytest.raises(anthropic.BadRequestError, match="this server fetches no images"):
        client.messages.create(**given, max_tokens=6)


def test_ollama(image_server: str, expected: str, tmp_path: Path) -> None:
    client, options = ollama.Client(image_server), {"temperature": 0, "num_predict": 6}
    path = tmp_path / "cat.png"
    path.write_bytes(PNG)
    for image in (DATA, PNG, str(path)):  # the library reads files itself
        message = {"role": "user", "content": TEXT, "images": [image]}
        assert client.chat(MODEL, [message], options=options).message.content == expected
        assert client.generate(MODEL, TEXT, images=[image], options=options).response == expected
    assert "vision" in (client.show(MODEL).capabilities or ())


def test_langchain(image_server: str, expected: str) -> None:
    message = HumanMessage(content=[{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": TEXT}])
    chat = ChatOpenAI(base_url=f"{image_server}/v1", api_key="none", model=MODEL, max_tokens=6, temperature=0)  # type: ignore[arg-type,call-arg]
    assert chat.invoke([message]).content == expected
    answer = ChatOllama(base_url=image_server, model=MODEL, num_predict=6, temperature=0).invoke([message])
    assert answer.response_metadata["prompt_eval_count"] > 40, "it writes the text on a line of its own"


@pytest.mark.parametrize("url", ["https://example.org/cat.png", "file:///etc/passwd"])
def test_no_url_is_fetched(image_server: str, url: str) -> None:
    client = openai.OpenAI(base_url=f"{image_server}/v1", api_key="none")
    content: Any = [{"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError, match="nothing is fetched from other places"):
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}])
