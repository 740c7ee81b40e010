"""Text between a prefix and a suffix, at the three doors of OpenAI, Ollama and llama-server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.server import RunningServer, running_server
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import CHATML_SETTINGS, byte_level, write_tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PROMPT = "<|fim_prefix|>the <|fim_suffix|> and<|fim_middle|>"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_tiny_qwen3(tmp_path_factory.mktemp("coder"), settings={"vocab_size": 384, "eos_token_id": 383})
    library = byte_level(control=("<|im_start|>", "<|im_end|>", *MARKS, "<|file_sep|>", "<|repo_name|>"))
    write_tokenizer(folder, library, CHATML_SETTINGS)
    with running_server(folder) as running:
        yield running


def completed(server: RunningServer, prompt: str, **fields: Any) -> Any:
    answer = server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "max_tokens": 12, **fields})
    assert answer.status == 200, answer.body
    return answer.value


def test_every_door_continues_the_same_prompt(server: RunningServer) -> None:
    plain = completed(server, PROMPT)
    expected = plain["choices"][0]["text"]
    found = completed(server, "the ", suffix=" and")
    assert found["choices"][0]["text"] == expected
    assert found["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    both = completed(server, ["the ", "the "], suffix=" and")  # type: ignore[arg-type]
    assert [choice["text"] for choice in both["choices"]] == [expected, expected]
    options = {"temperature": 0, "num_predict": 12}
    answer = server.post("/api/generate", {"prompt": "the ", "suffix": " and", "stream": False, "options": options})
    assert answer.value["response"] == expected
    greedy = {"temperature": 0, "n_predict": 12, "input_suffix": " and"}
    for prefix, prompt in (("the ", ""), ("th", "e "), ("", "the ")):
        answer = server.post("/infill", {"input_prefix": prefix, "prompt": prompt, **greedy})
        assert answer.value["content"] == expected
    streamed = server.post("/infill", {"input_prefix": "the ", "stream": True, **greedy})
    assert "".join(event["content"] for event in streamed.events) == expected


def test_ollamas_clients_see_that_a_model_can_fill_in(server: RunningServer) -> None:
    name = server.get("/v1/models").value["data"][0]["id"]
    assert "insert" in server.post("/api/show", {"model": name}).value["capabilities"]


def test_other_files_are_shown_to_the_model(server: RunningServer) -> None:
    before = "<|repo_name|>unnamed\n<|file_sep|>a.py\nhello<|file_sep|>unnamed\n"
    expected = completed(server, before + PROMPT)["choices"][0]["text"]
    extra = [{"filename": "a.py", "text": "hello", "time": [7, 5]}]  # editors tell when they took it
    fields = {"input_prefix": "the ", "input_suffix": " and", "input_extra": extra, "temperature": 0, "n_predict": 12}
    assert server.post("/infill", fields).value["content"] == expected


def test_what_editors_always_send_is_taken(server: RunningServer) -> None:
    fields = {"input_prefix": "the ", "input_suffix": " and", "temperature": 0, "n_predict": 12}
    more = {
        **{"cache_prompt": True, "n_indent": 4, "stream": False, "t_max_predict_ms": 1000, "t_max_prompt_ms": 500},
        **{"response_fields": ["content"], "samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.9},
    }
    plain = server.post("/infill", fields).value["content"]
    assert server.post("/infill", fields | more).value["content"] == plain
    ahead = {"n_predict": 0, "samplers": [], "input_prefix": "", "input_suffix": "", "prompt": ""}
    assert server.post("/infill", fields | more | ahead).value["tokens_predicted"] == 0


@pytest.mark.parametrize("mark", ["<|file_sep|>", "<|fim_prefix|>"])
def test_a_middle_ends_where_the_model_begins_something_else(server: RunningServer, mark: str) -> None:
    [token] = server.post("/tokenize", {"prompt": mark}).value["tokens"]
    fields: dict[str, Any] = {"logit_bias": {str(token): 100}}
    assert completed(server, "the ", suffix=" and", **fields)["choices"][0]["finish_reason"] == "stop"
    assert completed(server, PROMPT, **fields)["choices"][0]["finish_reason"] == "length"
    answer = server.post("/infill", {"input_prefix": "the ", "input_suffix": " and", "n_predict": 12, **fields})
    assert (answer.value["stop_type"], answer.value["content"]) == ("eos", "")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "b"}, "prompt"),
        ("/v1/completions", {"prompt": "a", "suffix": 1}, "suffix"),
        ("/infill", {"input_extra": [{"name": "a.py"}]}, "input_extra[0].name"),
        ("/infill", {"input_prefix": "a " * 9000}, "prompt"),
    ],
)
def test_what_a_suffix_does_not_suit_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = server.post(path, fields)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_a_model_without_the_tokens_says_so() -> None:
    with running_server() as guide:
        for path, fields, param in (
            ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
            ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
        ):
            answer = guide.post(path, fields)
            assert (answer.status, answer.error["param"]) == (400, param)
            assert "no tokens for text between a prefix and a suffix" in answer.error["message"]
