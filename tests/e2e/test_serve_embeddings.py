"""/v1/embeddings and Ollama's paths for vectors, over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM
from quire.core.pooling import vector_numbers
from support.server import JSON, RunningServer, running_server

TEXTS = ["What is a block table?", "blocks", "A block holds the keys and values of sixteen tokens. " * 5]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(settings={"pooling": "mean", "max_model_len": 128}) as running:
        yield running


@pytest.fixture(scope="module")
def expected() -> list[list[float]]:
    with LLM("guide", kv_memory="8MiB", pooling="mean") as llm:
        return [output.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


def ask(server: RunningServer, path: str, **fields: Any) -> Any:
    answer = server.ask("POST", path, json.dumps(fields).encode(), JSON)
    assert answer.status == 200, answer.error
    return answer.value


def test_vectors_are_those_of_the_engine_alone_and_together(server: RunningServer, expected: list[list[float]]) -> None:
    together = ask(server, "/v1/embeddings", input=TEXTS, model="guide", user="me")
    assert [each["embedding"] for each in together["data"]] == expected
    assert [(each["index"], each["object"]) for each in together["data"]] == [(i, "embedding") for i in range(3)]
    assert together["object"] == "list" and together["model"] == "guide"
    singles = [ask(server, "/v1/embeddings", input=text)["data"][0]["embedding"] for text in TEXTS]
    assert singles == expected
    usage = together["usage"]
    assert usage["prompt_tokens"] == usage["total_tokens"] > 3


def test_base64_has_the_same_numbers_and_token_ids_are_the_same_text(
    server: RunningServer, expected: list[list[float]]
) -> None:
    coded = ask(server, "/v1/embeddings", input=TEXTS, encoding_format="base64")["data"]
    assert [vector_numbers(base64.b64decode(each["embedding"])).tolist() for each in coded] == expected
    ids = [ask(server, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    assert [each["embedding"] for each in ask(server, "/v1/embeddings", input=ids)["data"]] == expected
    assert ask(server, "/v1/embeddings", input=ids[0])["data"][0]["embedding"] == expected[0]


def test_ollama_gets_the_same(server: RunningServer, expected: list[list[float]]) -> None:
    found = ask(server, "/api/embed", model="guide", input=TEXTS)
    assert found["embeddings"] == expected and found["prompt_eval_count"] > 3
    assert ask(server, "/api/embed", model="guide", input=TEXTS[0], keep_alive="5m")["embeddings"] == expected[:1]
    assert ask(server, "/api/embeddings", model="guide", prompt=TEXTS[1])["embedding"] == expected[1]
    cut = ask(server, "/api/embed", model="guide", input=TEXTS[0], dimensions=7)["embeddings"][0]
    assert len(cut) == 7


def test_a_text_that_is_too_long_is_cut_where_that_is_asked_for(server: RunningServer) -> None:
    long = "block " * 300
    answer = server.ask("POST", "/v1/embeddings", json.dumps({"input": long}).encode(), JSON)
    assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
    cut = ask(server, "/v1/embeddings", input=long, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 127
    ids = ask(server, "/tokenize", prompt=long)["tokens"]
    assert ask(server, "/v1/embeddings", input=ids[:127])["data"] == cut["data"]
    for text in (long, long * 50):  # the second is longer than any tokenizer here would take
        assert ask(server, "/api/embed", model="guide", input=text)["embeddings"][0] == cut["data"][0]["embedding"]
    refused = server.ask("POST", "/api/embed", json.dumps({"input": long, "truncate": False}).encode(), JSON)
    assert refused.status == 400


def test_many_texts_at_once(server: RunningServer, expected: list[list[float]]) -> None:
    found = ask(server, "/v1/embeddings", input=[TEXTS[index % 2] for index in range(2048)], dimensions=192)["data"]
    assert all(each["embedding"] == expected[index % 2] for index, each in enumerate(found))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input[0]"),
        ({"input": [5, -1]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 193}, "dimensions"),
        ({"input": "a", "encoding_format": "ubinary"}, "encoding_format"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"inputs": "a"}, "inputs"),
        ({}, "input"),
    ],
)
def test_what_is_refused_is_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.ask("POST", "/v1/embeddings", json.dumps(fields).encode(), JSON)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_model_that_says_nothing_of_vectors_is_named() -> None:
    with running_server() as other:
        for path, fields in (("/v1/embeddings", {"input": "a"}), ("/api/embed", {"model": "guide", "input": "a"})):
            answer = other.ask("POST", path, json.dumps(fields).encode(), JSON)
            assert answer.status == 400 and "--pooling" in json.dumps(answer.value)
