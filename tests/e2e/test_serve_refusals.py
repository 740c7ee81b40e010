"""Bad input over HTTP: the status, the code and the field that is named, and that nothing was enqueued."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError

from quire.engine.commands import Add, AnyCommand
from support.server import JSON, RunningServer, running_server

BIG = 1 << 63


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(max_body="1MiB", max_choices=16, settings={"max_model_len": 200}) as running:
        yield running


@pytest.fixture
def num_added(server: RunningServer) -> Iterator[list[int]]:
    """Counts the requests that reach the engine."""
    counts = [0]
    send = server.llm._thread.send

    def count(command: AnyCommand) -> None:
        counts[0] += isinstance(command, Add)
        send(command)

    server.llm._thread.send = count  # type: ignore[method-assign]
    yield counts
    del server.llm._thread.send


COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 1_000_000}, "n"),
    ({"n": 1.5}, "n"),
    ({"n": "2"}, "n"),
    ({"n": True}, "n"),
    ({"n": 10**30}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"n": 9, "prompt": ["a", "b"]}, "n"),
    ({"best_of": 17}, "best_of"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": BIG}, "max_tokens"),
    ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"min_tokens": BIG}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 1e308}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": -1}, "seed"),
    ({"seed": BIG}, "seed"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": "5"}, "logprobs"),
    ({"logprobs": 10_000}, "logprobs"),
    ({"prompt_logprobs": 10_000}, "prompt_logprobs"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1, 1 << 20]}, "prompt[1]"),
    ({"prompt": [1, 1 << 40]}, "prompt[1]"),
    ({"prompt": [[1], [2, -5]]}, "prompt[1][1]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": ["a", 1]}, "prompt[0]"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"9999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]"),
    ({"logit_bias": {str(i): 1 for i in range(2000)}}, "logit_bias"),
    ({"bad_words": ["x" * 300]}, "bad_words"),
    ({"bad_words": [""]}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1 << 20]}, "allowed_token_ids"),
    ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop": ["a"] * 65}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": "x" * 100_000}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"suffix": "x"}, "suffix"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"grammar": "start: nothing"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "n": 2}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs.regex"),
    ({"guided_json": {}}, "guided_json"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "x" * 1_000}, ""),
    ({"cache_salt": "x" * 1_025}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"priority": 1 << 40}, "priority"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"what": 1}, "what"),
    ({"request_id": ""}, "request_id"),
    ({"metadata": {"a": "\0"}}, "metadata"),
]


@pytest.mark.parametrize(("fields", "param"), COMPLETIONS, ids=[json.dumps(fields)[:40] for fields, _ in COMPLETIONS])
def test_bad_fields_of_a_completion(
    server: RunningServer, num_added: list[int], fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        if stream and "stream_options" in fields:
            continue
        answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 8, "stream": stream, **fields})
        if not param:
            assert answer.status == 200
            continue
        assert answer.status == 400, answer.body
        assert answer.headers["content-type"] == "application/json"
        assert answer.error["param"] == param
        assert answer.error["type"] == "invalid_request_error"
        assert answer.error["code"]
        assert num_added == [0]
    server.check()


USER = {"role": "user", "content": "a"}
TOOLS = [{"type": "function", "function": {"name": "now"}}]
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "a"}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": ["a"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "tool", "content": "a"}]}, "messages[1].tool_call_id"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": "a", "audio": {"id": "x"}}]}, "messages[0].audio"),
    ({"messages": [{"role": "assistant", "refusal": "no"}]}, "messages[0].refusal"),
    ({"messages": [USER] * 10_000}, "messages"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"min_tokens": 5_000}, "min_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"n": 17}, "n"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
    ({"response_format": {"type": "poem"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "what"}}}},
        "response_format.json_schema.schema",
    ),
    ({"response_format": {"type": "json_object"}, "allowed_token_ids": [4]}, "response_format"),
    ({"functions": [{}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"chat_template": "{% for i in range(10**9) %}{% endfor %}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": "a" * 100}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "messages[0]"),
    ({"suffix": "x"}, "suffix"),
    ({"echo": True}, "echo"),
    ({"documents": [{}]}, "documents"),
    ({"logit_bias": {"1": 1e999}}, "logit_bias[1]"),
]


@pytest.mark.parametrize(("fields", "param"), CHATS, ids=[json.dumps(fields)[:40] for fields, _ in CHATS])
def test_bad_fields_of_a_chat(server: RunningServer, num_added: list[int], fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"messages": [USER], **fields}).replace("Infinity", "1e999").encode()
    answer = server.ask("POST", "/v1/chat/completions", body, JSON)
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert num_added == [0]
    server.check()


RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": []}, "input"),
    ({"input": 7}, "input"),
    ({"input": [{"type": "function_call"}]}, "input[0].name"),
    ({"input": [{"type": "function_call_output", "output": "3"}]}, "input[0].call_id"),
    ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
    ({"text": {"format": {"type": "json_schema", "name": "s", "schema": {"$ref": "http://x/"}}}}, "text.format.schema"),
    ({"truncation": "auto"}, "truncation"),
    ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"n": 2}, "n"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"metadata": {"a": 1}}, "metadata"),
    ({"top_logprobs": 30}, "top_logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), RESPONSES, ids=[json.dumps(fields)[:40] for fields, _ in RESPONSES])
def test_bad_fields_of_a_response(
    server: RunningServer, num_added: list[int], fields: dict[str, Any], param: str
) -> None:
    answer = server.post("/v1/responses", {"input": "a", **fields})
    assert answer.status == 400, answer.body
    assert answer.error["param"] == param
    assert num_added == [0]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, "prompt"),
        ("/tokenize", {"prompt": 7}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, 1 << 20]}, "tokens[1]"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_bad_tokens(server: RunningServer, path: str, fields: dict[str, Any], param: str) -> None:
    for prefix in ("", "/v1"):
        answer = server.post(prefix + path, fields)
        assert (answer.status, answer.error["param"]) == (400, param)


def test_texts_become_tokens_and_texts_again(server: RunningServer) -> None:
    answer = server.post("/tokenize", {"prompt": "é <|im_end|> 你", "return_token_strs": True}).value
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 200
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).value == {"prompt": "é <|im_end|> 你"}
    assert server.post("/v1/tokenize", {"prompt": ""}).value["tokens"] == []


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'{"prompt": NaN}', b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "\\ud800"}', b"\xff"],
)
def test_bodies_that_are_no_json(server: RunningServer, num_added: list[int], body: bytes) -> None:
    paths = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize")
    for path in paths:
        answer = server.ask("POST", path, body, JSON)
        assert answer.status == 400
        assert answer.error["type"] == "invalid_request_error"
    assert num_added == [0]


def test_deep_nesting(server: RunningServer) -> None:
    for body in (
        b"[" * 100_000,
        b'{"prompt":' * 50_000,
        b'{"messages":[{"content":' + b"[" * 500 + b"]" * 500 + b"}]}",
    ):
        assert server.ask("POST", "/v1/chat/completions", body, JSON).status == 400


FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize"])
def test_a_form_of_a_page_is_refused_wherever_curl_may_send_one(server: RunningServer, path: str) -> None:
    """What a page of another site can have a browser send without asking; old browsers send only the referrer."""
    body = b'{"prompt": "a", "x": "=' + b'"}'  # a field of a text/plain form is `name=value`: this one reads as JSON
    for kind in (FORM, {"content-type": "text/plain"}, {"content-type": "multipart/form-data; boundary=x"}, {}):
        for name, value in (
            ("origin", "http://evil.example"),
            ("origin", "null"),
            ("referer", "http://evil.example/"),
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
            ("sec-fetch-site", "none"),
        ):
            answer = server.ask("POST", path, body, {**kind, name: value})
            assert answer.status in (403, 415), (kind, name, value)
            assert answer.error["code"] in ("foreign_origin", "unsupported_media_type")


def test_types_and_encodings_of_bodies(server: RunningServer) -> None:
    body = json.dumps({"prompt": "a"}).encode()
    for headers in (
        {"origin": server.url},  # a page would say it
        {"sec-fetch-site": "same-origin"},
        {"content-type": "text/plain"},
        {"content-type": "multipart/form-data; boundary=x"},
        {**FORM, "origin": server.url},
        {**FORM, "referer": "http://evil.example/"},
        {**FORM, "sec-fetch-site": "same-origin"},
        {**JSON, "content-encoding": "gzip"},
    ):
        sent = gzip.compress(body) if "content-encoding" in headers else body
        answer = server.ask("POST", "/v1/completions", sent, headers)
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
    charset = {"content-type": "Application/JSON; charset=utf-8", "content-encoding": "identity"}
    assert server.ask("POST", "/v1/completions", body, charset).status == 200
    assert server.ask("POST", "/v1/completions", body, {}).status == 200, "nobody says that it is no JSON"
    assert server.ask("POST", "/v1/completions", body, FORM).status == 200, "curl -d says so of everything"
    assert server.ask("POST", "/v1/completions", b"prompt=a&max_tokens=1", FORM).error["code"] == "invalid_json"
    large = json.dumps({"prompt": "a" * (2 << 20)}).encode()
    assert server.ask("POST", "/v1/completions", large, JSON).status == 413


def test_the_models_are_listed_with_a_slash_too(server: RunningServer) -> None:
    assert server.ask("GET", "/v1/models/", None, {}).value == server.ask("GET", "/v1/models", None, {}).value
    answer = server.ask("GET", "/v1/models/gpt-4o", None, {})
    message = "model 'gpt-4o' not found; this server serves 'guide'; GET /v1/models lists all"
    assert (answer.status, answer.error["message"]) == (404, message)


def test_a_context_that_is_too_long(server: RunningServer, num_added: list[int]) -> None:
    with server.client() as client:
        for prompt, options in (("a b" * 400, {"max_tokens": 1}), ("a", {"max_tokens": 300})):
            with pytest.raises(BadRequestError, match="maximum context length") as caught:
                client.completions.create(model="guide", prompt=prompt, **options)  # type: ignore[call-overload]
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.param == "prompt"
        with pytest.raises(BadRequestError, match="maximum context length") as caught:
            client.chat.completions.create(model="guide", messages=[{"role": "user", "content": "a b" * 400}])
        assert caught.value.param == "messages"
    assert num_added == [0]


def test_other_models_other_paths_other_methods(server: RunningServer) -> None:
    with server.client() as client:
        with pytest.raises(NotFoundError) as caught:
            client.completions.create(model="gpt-5", prompt="a")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(NotFoundError):
            client.models.retrieve("gpt-5")
        [card] = client.models.list().data
        assert (card.id, card.object, card.owned_by) == ("guide", "model", "quire")
        assert client.models.retrieve("guide") == card
    assert server.get("/v1/models").value["data"][0]["max_model_len"] == 200
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("GET", "/v1/nothing", 404),
        ("POST", "/v1/completions/", 404),
    ):
        answer = server.ask(method, path, None, {})
        assert answer.status == status
        assert answer.error["message"]


def test_models_have_the_names_they_are_given() -> None:
    with running_server(served_model_name=("small", "owner/guide")) as server, server.client() as client:
        assert [card.id for card in client.models.list().data] == ["small", "owner/guide"]
        assert client.models.retrieve("owner/guide").id == "owner/guide"
        assert client.completions.create(model="owner/guide", prompt="a", max_tokens=1).model == "owner/guide"
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).value["model"] == "small"
        with pytest.raises(NotFoundError):
            client.completions.create(model="guide", prompt="a")


def test_an_engine_without_a_tokenizer() -> None:
    with running_server(settings={"skip_tokenizer_init": True}) as server:
        fields = {"prompt": [5, 6, 7], "max_tokens": 3, "logprobs": 1, "echo": True}
        [choice] = server.post("/v1/completions", fields).value["choices"]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
        assert server.post("/v1/completions", {"prompt": "a"}).error["param"] == "prompt"
        assert server.post("/v1/chat/completions", {"messages": [USER]}).error["param"] == "messages"
        assert server.post("/tokenize", {"prompt": "a"}).status == 400
