"""OpenAI's library for JavaScript: a second, stricter reader of what the server says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("client.mjs")


@pytest.fixture(scope="module")
def found(base_url: str) -> dict[str, Any]:
    modules = Path(os.environ["QUIRE_NODE_MODULES"])
    script = modules.parent / SCRIPT.name  # a script finds its modules beside itself
    script.write_bytes(SCRIPT.read_bytes())
    done = subprocess.run(["node", script, base_url], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_an_answer(found: dict[str, Any]) -> None:
    assert found["models"] == ["guide"]
    assert found["chat"]["text"]
    assert found["chat"]["finish"] in ("stop", "length")
    usage = found["chat"]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_a_stream_says_the_same(found: dict[str, Any]) -> None:
    assert found["stream"]["text"] == found["chat"]["text"] == found["helper"]
    assert found["stream"]["roles"] == ["assistant"]
    assert found["stream"]["finishes"] == [found["chat"]["finish"]]
    assert found["stream"]["usage"]["completion_tokens"] == found["chat"]["usage"]["completion_tokens"]
    assert found["stream"]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_completions_of_several_prompts(found: dict[str, Any]) -> None:
    assert [index for index, _ in found["completions"]] == [0, 1, 2, 3]
    texts = [text for _, text in found["completions"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]


def test_responses(found: dict[str, Any]) -> None:
    assert found["response"]["text"] == found["responseStream"] == found["chat"]["text"]
    assert found["events"][0] == "response.created"
    assert found["events"][-1] in ("response.completed", "response.incomplete")


def test_answers_are_parsed_by_a_schema(found: dict[str, Any]) -> None:
    assert found["parsed"]["kind"] in ("block", "table")
    assert 0 <= found["parsed"]["count"] <= 99
    assert found["parsed"] == found["parsedStream"] == found["parsedResponse"]


def test_errors_are_typed(found: dict[str, Any]) -> None:
    assert found["errors"] == [
        ["BadRequestError", 400, "invalid_value", "temperature"],
        ["BadRequestError", 400, "context_length_exceeded", "messages"],
        ["NotFoundError", 404, "model_not_found", "model"],
    ]
