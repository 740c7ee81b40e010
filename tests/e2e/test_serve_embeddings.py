"""/v1/embeddings, and the paths of Ollama and Cohere for vectors, over HTTP."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from quire import LLM
from quire.core.pooling import vector_numbers
from quire.guide import GUIDE_FOLDER
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
    assert cut["usage"]["prompt_tokens"] == 128
    ids = ask(server, "/tokenize", prompt=long)["tokens"]
    assert ask(server, "/v1/embeddings", input=ids[:128])["data"] == cut["data"]
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
            assert answer.status == 400
            assert "this server was started without --pooling" in json.dumps(answer.value)
            assert "start it with --pooling mean or --pooling last" in json.dumps(answer.value)


def cohere(server: RunningServer, **fields: Any) -> Any:
    return ask(server, "/v2/embed", model="guide", input_type="search_document", **fields)


def test_cohere_gets_the_same_in_all_its_types(server: RunningServer, expected: list[list[float]]) -> None:
    types = ["float", "base64", "int8", "uint8", "binary", "ubinary", "float"]
    found = cohere(server, texts=TEXTS, embedding_types=types)
    vectors = found["embeddings"]
    assert set(vectors) == set(types) and vectors["float"] == expected
    assert [vector_numbers(base64.b64decode(each)).tolist() for each in vectors["base64"]] == expected
    for index, numbers in enumerate(np.array(expected, dtype=np.float32)):
        whole = np.array(vectors["int8"][index])
        assert abs(whole).max() == 127
        assert np.abs(whole / 127 * abs(numbers).max() - numbers).max() <= abs(numbers).max() / 254 * (1 + 1e-6)
        assert vectors["uint8"][index] == (whole + 128).tolist()
        assert vectors["ubinary"][index] == np.packbits(numbers > 0).tolist()
        assert vectors["binary"][index] == (np.packbits(numbers > 0).astype(int) - 128).tolist()
    assert found["texts"] == TEXTS and found["response_type"] == "embeddings_by_type" and found["id"]
    assert found["meta"]["api_version"] == {"version": "2"}
    assert found["meta"]["billed_units"] == found["meta"]["tokens"] != {"input_tokens": 0}
    many = [TEXTS[index % 3] for index in range(1000)]
    for index, each in enumerate(cohere(server, texts=many, embedding_types=["int8"])["embeddings"]["int8"]):
        assert each == vectors["int8"][index % 3]


def test_cohere_may_ask_for_fewer_numbers_and_for_texts_in_parts(
    server: RunningServer, expected: list[list[float]]
) -> None:
    cut = ask(server, "/v1/embeddings", input=TEXTS[0], dimensions=8)["data"][0]["embedding"]
    assert cohere(server, texts=TEXTS[:1], output_dimension=8)["embeddings"] == {"float": [cut]}
    parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    assert cohere(server, inputs=parts)["embeddings"]["float"] == expected
    two = [{"content": [{"type": "text", "text": text} for text in TEXTS[:2]]}]
    found = cohere(server, inputs=two)
    assert found["texts"] == ["\n".join(TEXTS[:2])]
    assert found["embeddings"] == cohere(server, texts=found["texts"])["embeddings"]


def test_cohere_has_long_texts_cut_at_either_end_or_refused(server: RunningServer) -> None:
    words = " ".join(str(number) for number in range(200))
    ids = ask(server, "/tokenize", prompt=words)["tokens"]

    def vector(tokens: list[int]) -> list[list[float]]:
        return [ask(server, "/v1/embeddings", input=tokens)["data"][0]["embedding"]]

    for fields, kept in (
        ({}, ids[:128]),
        ({"truncate": "END", "max_tokens": 9}, ids[:9]),
        ({"truncate": "START"}, ids[-128:]),
        ({"truncate": "START", "max_tokens": 9}, ids[-9:]),
        ({"truncate": "END", "max_tokens": 1000}, ids[:128]),
    ):
        assert cohere(server, texts=[words], **fields)["embeddings"]["float"] == vector(kept)
    short = cohere(server, texts=TEXTS[1:2], truncate="NONE", max_tokens=50)
    assert short["embeddings"] == cohere(server, texts=TEXTS[1:2])["embeddings"]
    for fields in ({"truncate": "NONE"}, {"truncate": "NONE", "max_tokens": 50}, {"truncate": "NONE", "max_tokens": 1}):
        body = json.dumps({"texts": ["a", words], **fields}).encode()
        answer = server.ask("POST", "/v2/embed", body, JSON)
        assert (answer.status, answer.error["param"]) == (400, "texts[1]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": "a"}, "texts"),
        ({"texts": ["a", ""]}, "texts[1]"),
        ({"texts": ["a"] * 2049}, "texts"),
        ({"inputs": []}, "inputs"),
        ({"inputs": [{"content": []}]}, "inputs[0].content"),
        (
            {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "inputs[0].content[0].type",
        ),
        ({"texts": ["a"], "images": ["data:"]}, "images"),
        ({"texts": ["a"], "input_type": "image"}, "input_type"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "embedding_types": ["float", "int4"]}, "embedding_types[1]"),
        ({"texts": ["a"], "embedding_types": ["float", "binary"], "output_dimension": 12}, "embedding_types[1]"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ({"texts": ["a"], "output_dimension": 193}, "output_dimension"),
        ({"texts": ["a"], "output_dimension": 0}, "output_dimension"),
        ({"texts": ["a"], "encoding_format": "float"}, "encoding_format"),
    ],
)
def test_what_is_refused_of_coheres_calls_is_named(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.ask("POST", "/v2/embed", json.dumps(fields).encode(), JSON)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert "\n" not in answer.error["message"]


@pytest.mark.parametrize("keeps_start", [True, False])
def test_a_text_that_is_cut_keeps_the_tokens_around_it(keeps_start: bool, tmp_path: Path) -> None:
    """Models of vectors read the token that ends a text; the oracle cuts as the library of the tokenizer does."""
    for file in GUIDE_FOLDER.iterdir():
        (tmp_path / file.name).symlink_to(file)
    oracle = tokenizers.Tokenizer.from_file(str(GUIDE_FOLDER / "tokenizer.json"))
    first, last = (oracle.id_to_token(index) for index in (0, 1))
    oracle.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{first} $A {last} {last}", special_tokens=[(first, 0), (last, 1)]
    )
    (tmp_path / "tokenizer.json").unlink()
    oracle.save(str(tmp_path / "tokenizer.json"))
    with running_server(tmp_path, settings={"pooling": "last", "max_model_len": 64}) as running:
        for length in (63, 9, 4):
            oracle.enable_truncation(length, direction="right" if keeps_start else "left")
            ids = oracle.encode(TEXTS[2]).ids
            assert len(ids) == length and ids[-2:] == [1, 1] and ids[0] == 0
            expected = ask(running, "/v1/embeddings", input=ids)["data"][0]["embedding"]
            truncate = "END" if keeps_start else "START"
            found = ask(running, "/v2/embed", texts=[TEXTS[2]], truncate=truncate, max_tokens=length)
            assert found["embeddings"]["float"] == [expected]
