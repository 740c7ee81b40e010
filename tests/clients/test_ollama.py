"""Ollama's libraries for Python and JavaScript: chat, streams, prompts, tools, formats, lists, errors."""

from __future__ import annotations

import asyncio
import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import ollama
import pytest
from langchain_ollama import ChatOllama
from pydantic import BaseModel, Field

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network for prices

import litellm

SCRIPT = Path(__file__).with_name("ollama.mjs")
MESSAGES: Any = [{"role": "user", "content": "What is a block table?"}]
GREEDY: Any = {"temperature": 0, "num_predict": 24}


class Part(BaseModel):
    count: int = Field(ge=0, le=99)


def add_numbers(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number
        b: The second number
    """
    return a + b


@pytest.fixture(scope="module")
def client(server: str) -> ollama.Client:
    return ollama.Client(server)


def test_sync_async_and_streams_agree(client: ollama.Client, server: str) -> None:
    answer = client.chat("guide", MESSAGES, options=GREEDY)
    text = answer.message.content
    assert text
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "length", 24)
    assert answer.eval_count / answer.eval_duration > 0, "what programs show as the speed"
    parts = list(client.chat("guide", MESSAGES, options=GREEDY, stream=True))
    assert "".join(part.message.content or "" for part in parts) == text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert client.generate("guide", MESSAGES[0]["content"], options=GREEDY).response == text
    streamed = client.generate("guide", MESSAGES[0]["content"], options=ollama.Options(**GREEDY), stream=True)
    assert "".join(part.response or "" for part in streamed) == text

    async def ask() -> list[str]:
        several = ollama.AsyncClient(server)
        answers = await asyncio.gather(*(several.chat("guide:latest", MESSAGES, options=GREEDY) for _ in range(8)))
        pieces = [
            part.message.content or ""
            async for part in await several.chat("guide", MESSAGES, options=GREEDY, stream=True)
        ]
        return [each.message.content or "" for each in answers] + ["".join(pieces)]

    assert asyncio.run(ask()) == [text] * 9


def test_a_stream_that_is_left_ends(client: ollama.Client) -> None:
    stream = client.generate("guide", "A block", raw=True, options={"temperature": 0}, stream=True)
    assert next(stream).response
    stream.close()
    assert client.generate("guide", "A block", raw=True, options=GREEDY).done


def test_a_format_of_a_class(client: ollama.Client) -> None:
    answer = client.chat("guide", MESSAGES, format=Part.model_json_schema() | {"additionalProperties": False})
    assert 0 <= Part.model_validate_json(answer.message.content or "").count <= 99
    held = client.generate("guide", "a", format={"enum": ["yes", "no"]})
    assert json.loads(held.response) in ("yes", "no")


def test_a_function_is_called_and_answered(client: ollama.Client) -> None:
    """The built-in model knows no function: what makes it call one is that it may say little else."""
    asked: Any = {"tools": [add_numbers], "format": {"enum": ["no"]}}
    for seed in range(200):
        options = {"temperature": 5, "seed": seed, "num_predict": 400}
        answer = client.chat("guide", MESSAGES, options=options, **asked)
        if answer.message.tool_calls and answer.done_reason == "stop":
            break
    calls = answer.message.tool_calls
    assert calls
    for call in calls:
        assert call.function.name == "add_numbers"
        assert add_numbers(**call.function.arguments) == sum(call.function.arguments.values())
    parts = list(client.chat("guide", MESSAGES, options=options, stream=True, **asked))
    assert [call for part in parts for call in part.message.tool_calls or []] == calls
    told = [*MESSAGES, answer.message, {"role": "tool", "tool_name": "add_numbers", "content": "3"}]
    assert client.chat("guide", told, tools=[add_numbers], options={"num_predict": 1}).eval_count == 1


def test_what_there_is(client: ollama.Client) -> None:
    [listed] = client.list().models
    assert (listed.model, listed.details.family) == ("guide:latest", "qwen3")
    [loaded] = client.ps().models
    assert (loaded.name, loaded.size_vram) == ("guide:latest", 0)
    shown = client.show("guide")
    assert shown.capabilities == ["completion", "embedding", "tools"]
    assert shown.modelinfo["general.architecture"] == "qwen3"
    assert client.generate("guide", keep_alive="5m").done_reason == "load"


def test_errors_have_a_status_and_say_what_is_wrong(client: ollama.Client) -> None:
    def refused(work: Any) -> tuple[int, str]:
        with pytest.raises(ollama.ResponseError) as caught:
            work()
        return caught.value.status_code, caught.value.error

    status, error = refused(lambda: client.chat("nobody", MESSAGES))
    assert (status, error.startswith("model 'nobody' not found")) == (404, True)
    status, error = refused(lambda: list(client.chat("nobody", MESSAGES, stream=True)))
    assert (status, error.startswith("model 'nobody' not found")) == (404, True)
    status, error = refused(lambda: client.chat("guide", MESSAGES, options={"top_p": 2}))
    assert (status, error) == (400, "options.top_p is 2.0; allowed: a number above 0, at most 1")
    status, error = refused(lambda: client.embed("guide", "a", dimensions=1 << 20))
    assert (status, error.startswith("dimensions is 1048576; allowed: ")) == (400, True)
    for work in (client.pull, client.push, client.delete):
        assert refused(lambda work=work: work("guide"))[0] == 403
    assert refused(lambda: client.copy("guide", "mine"))[0] == 403
    assert refused(lambda: client.create("mine", from_="guide"))[0] == 403


def test_vectors_are_the_same_on_both_paths_alone_and_together(client: ollama.Client) -> None:
    texts = ["What is a block table?", "blocks"]
    together = client.embed("guide", texts)
    assert [client.embed("guide", text).embeddings[0] for text in texts] == list(together.embeddings)
    assert [client.embeddings("guide", text).embedding for text in texts] == list(together.embeddings)
    assert math.isclose(math.hypot(*together.embeddings[0]), 1, rel_tol=1e-6)
    assert together.prompt_eval_count
    assert len(client.embed("guide", texts[0], dimensions=7).embeddings[0]) == 7


def test_programs_that_speak_to_ollama_by_themselves(client: ollama.Client, server: str) -> None:
    text = client.chat("guide", MESSAGES, options=GREEDY).message.content
    chain = ChatOllama(model="guide", base_url=server, num_ctx=512, validate_model_on_init=True, **GREEDY)
    assert chain.invoke(MESSAGES[0]["content"]).content == text
    assert "".join(str(part.content) for part in chain.stream(MESSAGES[0]["content"])) == text
    held = chain.with_structured_output(Part, method="json_schema").invoke("How many?")
    assert isinstance(held, Part)
    for provider in ("ollama_chat", "ollama"):
        asked: Any = {"model": f"{provider}/guide", "api_base": server, "messages": MESSAGES, "temperature": 0}
        answer = litellm.completion(**asked, max_tokens=24)
        streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, max_tokens=24, stream=True)))
        assert answer.usage.completion_tokens == 24
        assert streamed.choices[0].message.content == answer.choices[0].message.content
        assert provider == "ollama" or answer.choices[0].message.content == text


@pytest.fixture(scope="module")
def found(server: str) -> dict[str, Any]:
    modules = Path(os.environ["QUIRE_NODE_MODULES"])
    script = modules.parent / SCRIPT.name  # a script finds its modules beside itself
    script.write_bytes(SCRIPT.read_bytes())
    done = subprocess.run(["node", script, server], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_ollama_node_reads_the_same(client: ollama.Client, found: dict[str, Any]) -> None:
    answer = client.chat("guide", MESSAGES, options=GREEDY)
    assert found["chat"] == found["stream"] == found["generate"] == answer.message.content
    assert found["reasons"] == ["length"]
    assert found["models"] == found["running"] == ["guide:latest"]
    assert found["capabilities"] == ["completion", "embedding", "tools"]
    assert json.loads(found["held"]) in ("yes", "no")
    assert found["aborted"] == "AbortError"
    assert found["version"]


def test_ollama_node_reads_errors(found: dict[str, Any]) -> None:
    (chat, status), (stream, stream_status) = found["errors"]
    assert chat == stream and chat.startswith("model 'nobody' not found")
    assert status == stream_status == 404
