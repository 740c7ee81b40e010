"""Anthropic's interface over HTTP: the texts of /v1/chat in other words, its errors, its keys, and hostile bodies."""

from __future__ import annotations

import json
import random
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import pytest

from support.message_events import added_up
from support.server import JSON, RunningServer, running_server
from support.server_thread import Answer
from support.tool_models import THINKS, WEATHER, write_tool_model

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
MESSAGES: Any = [{"role": "user", "content": "What is a block table?"}]
TEXT: Any = {"type": "text", "text": "What is a block table?"}
GREEDY: Any = {"temperature": 0, "max_tokens": 24}
TOOLS: Any = [{"name": "weather", "description": "It rains.", "input_schema": WEATHER}]
OFF: Any = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(tool_format="hermes") as running:
        yield running


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A model of random weights, whose template begins the reasoning, or ends it."""
    folder = write_tool_model(tmp_path_factory.mktemp("models") / "thinker", THINKS)
    with running_server(folder, served_model_name=("thinker",)) as running:
        yield running


@pytest.fixture(autouse=True)
def in_order(server: RunningServer) -> Iterator[None]:
    yield
    server.check()


def create(server: RunningServer, **fields: Any) -> Any:
    """An answer in one piece; the events of its stream add up to it, and its prompt has as many tokens as counted."""
    fields = {"messages": MESSAGES, **GREEDY, **fields}
    whole = server.post(PATH, fields)
    assert whole.status == 200, whole.body
    stream = server.post(PATH, {**fields, "stream": True})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert timeless(added_up(stream.events)) == timeless(whole.value)
    asked = {name: fields[name] for name in ("messages", "system", "tools", "thinking") if name in fields}
    usage = whole.value["usage"]
    assert server.post(COUNT, asked).value == {"input_tokens": num_input(usage)}
    found: Any = whole.value
    return found


def num_input(usage: Mapping[str, int]) -> int:
    assert usage["cache_creation_input_tokens"] == 0
    return usage["input_tokens"] + usage["cache_read_input_tokens"]


def timeless(message: Any) -> Any:
    """An answer without its ids, and without the part of the prompt that came from the cache."""
    content = [{key: each[key] for key in each if key not in ("id", "signature")} for each in message["content"]]
    usage = {"input": num_input(message["usage"]), "output": message["usage"]["output_tokens"]}
    return message | {"id": "", "content": content, "usage": usage}


def error_of(answer: Answer) -> tuple[int, str, str]:
    """The status, the type and the message of an error in Anthropic's form, which has nothing else."""
    value = answer.value
    assert (value.keys(), value["type"], value["error"].keys()) == (
        {"type", "error"},
        "error",
        {"type", "message"},
    )
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    return answer.status, value["error"]["type"], value["error"]["message"]


def refused(server: RunningServer, **fields: Any) -> tuple[int, str, str]:
    return error_of(server.post(PATH, {"messages": MESSAGES, **GREEDY, **fields}))


# ---- the texts of chat ----------------------------------------------------------------------------------------------


def test_fields_mean_what_they_mean_in_chat(server: RunningServer) -> None:
    chance = random.Random(7)
    texts = set()
    for _ in range(16):
        wanted: dict[str, Any] = {"seed": chance.randrange(1 << 31), "temperature": chance.choice([0, 0.7, 1])}
        wanted |= {
            "max_tokens": chance.randrange(1, 32),
            "top_p": chance.choice([0.5, 1]),
            "top_k": chance.choice([3, 0]),
        }
        stops = chance.choice([[], ["block"], ["a", "e"], [" the"]])
        answer = create(server, **wanted, stop_sequences=stops, system="Be brief.")
        system = {"role": "system", "content": "Be brief."}
        chat = server.post("/v1/chat/completions", {"messages": [system, *MESSAGES], **wanted, "stop": stops}).value
        [choice] = chat["choices"]
        [block] = answer["content"]
        assert block == {"type": "text", "text": choice["message"]["content"]}
        assert num_input(answer["usage"]) == chat["usage"]["prompt_tokens"]
        assert answer["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]
        stopped = choice["stop_reason"]
        reason = "max_tokens" if choice["finish_reason"] == "length" else "stop_sequence" if stopped else "end_turn"
        assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, stopped)
        texts.add((block["text"], reason))
    assert {reason for _, reason in texts} >= {"max_tokens", "stop_sequence"}
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "guide")
    assert answer["id"].startswith("msg_")


def test_an_answer_that_has_begun_is_continued(server: RunningServer) -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "A block table is "}]
    answer = create(server, messages=begun)
    chat = server.post("/v1/chat/completions", {"messages": begun, **GREEDY, "continue_final_message": True}).value
    assert answer["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert num_input(answer["usage"]) == chat["usage"]["prompt_tokens"]
    assert num_input(create(server)["usage"]) < num_input(answer["usage"])


def test_the_cached_part_of_a_prompt_is_counted_apart() -> None:
    with running_server() as server:
        first, second = (server.post(PATH, {"messages": MESSAGES, **GREEDY}).value["usage"] for _ in range(2))
        assert first["cache_read_input_tokens"] == 0
        assert second["cache_read_input_tokens"] > 0
        assert num_input(first) == num_input(second)
        start = server.post(PATH, {"messages": MESSAGES, **GREEDY, "stream": True}).events[0]
        assert start["message"]["usage"]["cache_read_input_tokens"] == second["cache_read_input_tokens"]


def test_a_block_that_changes_with_every_call_does_not_spoil_the_cache(server: RunningServer) -> None:
    usages = []
    for number in range(2):
        header = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        system = [{"type": "text", "text": each} for each in (header, "You are a careful agent that answers briefly.")]
        usages.append(server.post(PATH, {"messages": MESSAGES, **GREEDY, "system": system}).value["usage"])
    assert usages[1]["cache_read_input_tokens"] >= num_input(usages[0]) - 16


def test_max_tokens_may_be_more_than_the_context_has_left() -> None:
    for settings in ({"max_model_len": 64}, {"kv_memory": "512KiB"}):  # what fits is less than the model's context
        with running_server(settings=settings) as server:
            fields = {"messages": MESSAGES, "max_tokens": 1 << 20, "ignore_eos": True, "temperature": 0}
            answer = server.post(PATH, fields).value
            assert answer["stop_reason"] == "model_context_window_exceeded"
            used = num_input(answer["usage"]) + answer["usage"]["output_tokens"]
            chat = server.post("/v1/chat/completions", fields | {"max_tokens": None}).value
            assert used == chat["usage"]["total_tokens"]
            exact = server.post(PATH, fields | {"max_tokens": answer["usage"]["output_tokens"]}).value
            assert (exact["stop_reason"], exact["content"]) == ("max_tokens", answer["content"])
            long = [{"role": "user", "content": "block " * used * 2}]
            status, kind, message = refused(server, messages=long)
            assert (status, kind) == (400, "invalid_request_error")
            count = server.post(COUNT, {"messages": long}).value["input_tokens"]
            assert message.startswith(f"prompt is too long: {count} tokens > {used - 1} maximum; ")
            assert f"maximum context length to {used} tokens" in message or f"length is {used} tokens" in message
            assert ". Shorten the prompt" in message
            chat = server.post("/v1/chat/completions", {"messages": long})
            assert chat.error["message"].startswith(f"the prompt has {count} tokens; ")


def test_the_longest_prompt_is_as_long_as_the_error_says() -> None:
    def content(count: int) -> list[Any]:
        return [{"role": "user", "content": "block " * count}]

    with running_server(settings={"max_model_len": 64}) as server:
        by_count = {server.post(COUNT, {"messages": content(n)}).value["input_tokens"]: n for n in range(1, 60)}
        assert {63, 64} <= by_count.keys()
        status, _, message = refused(server, messages=content(by_count[64]))
        assert (status, message.partition(";")[0]) == (400, "prompt is too long: 64 tokens > 63 maximum")
        assert "is 64 tokens, of which 1 must stay free for the output. Shorten the prompt." in message
        assert server.post(PATH, {"messages": content(by_count[63]), **GREEDY}).status == 200


def test_a_format_holds_the_text(thinker: RunningServer) -> None:
    wanted = {"format": {"type": "json_schema", "schema": WEATHER}}
    for seed in range(3):
        answer = create(thinker, output_config=wanted, temperature=1, seed=seed, max_tokens=200, **OFF)
        [block] = answer["content"]
        held = json.loads(block["text"])
        assert held.keys() == {"city", "days"} and held["city"] in ("Paris", "Rome") and 1 <= held["days"] <= 7
    bad = {"format": {"type": "json_schema", "schema": {"$ref": "http://x/"}}}
    status, kind, message = refused(thinker, output_config=bad)
    assert (status, kind) == (400, "invalid_request_error")
    assert message.startswith("output_config.format.schema")


def test_reasoning_is_a_block_and_can_be_turned_off(thinker: RunningServer) -> None:
    for thinking in ({}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "adaptive"}}):
        answer = create(thinker, seed=5, max_tokens=8, **thinking)
        [block] = answer["content"]
        assert block["type"] == "thinking" and block["thinking"]
        assert block["signature"] == answer["id"]
    answer = create(thinker, seed=5, max_tokens=8, **OFF)
    assert [each["type"] for each in answer["content"]] == ["text"]


def test_calls_have_an_object_of_arguments_and_are_answered(thinker: RunningServer) -> None:
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "weather"},
        {"type": "any", "disable_parallel_tool_use": True},
    ):
        answer = create(thinker, tools=TOOLS, tool_choice=choice, temperature=1, seed=3, max_tokens=900, **OFF)
        assert answer["stop_reason"] == "tool_use"
        calls = answer["content"]
        assert len({call["id"] for call in calls}) == len(calls)
        assert len(calls) == 1 or choice == {"type": "any"}
        for call in calls:
            assert (call["type"], call["name"], call["input"].keys()) == ("tool_use", "weather", {"city", "days"})
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "19 degrees"} for call in calls]
    told = [*MESSAGES, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": results}]
    assert create(thinker, messages=told, max_tokens=2, tools=TOOLS, **OFF)["usage"]["output_tokens"] == 2
    cut = create(thinker, tools=TOOLS, tool_choice={"type": "any"}, temperature=1, seed=3, max_tokens=6, **OFF)
    assert (cut["content"], cut["stop_reason"]) == ([{"type": "text", "text": ""}], "max_tokens")


def test_a_conversation_with_calls_is_the_prompt_that_chat_makes_of_it(thinker: RunningServer) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome", "days": 2}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "Sun"}]}
    told = [
        *MESSAGES,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
    ]
    arguments = {"name": "weather", "arguments": '{"city": "Rome", "days": 2}'}
    chat = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [{"id": "c1", "type": "function", "function": arguments}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Sun"},
        {"role": "user", "content": "And?"},
    ]
    functions = [
        {"type": "function", "function": {"name": "weather", "description": "It rains.", "parameters": WEATHER}}
    ]
    seeded = {"seed": 9, "temperature": 1, "max_tokens": 6}
    text = create(thinker, messages=told, tools=TOOLS, **seeded)["content"]
    same = thinker.post("/v1/chat/completions", {"messages": chat, "tools": functions, **seeded}).value
    assert text[0]["thinking"] == same["choices"][0]["message"]["reasoning_content"]
    ids = thinker.post("/tokenize", {"messages": chat, "tools": functions}).value
    assert thinker.post(COUNT, {"messages": told, "tools": TOOLS}).value == {"input_tokens": ids["count"]}


def test_a_call_with_all_that_claude_code_sends(thinker: RunningServer) -> None:
    fresh = {"cache_control": {"type": "ephemeral"}}
    call = {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.26b; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "You are an agent.", **fresh},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "A reminder."}, {**TEXT, **fresh}]},
            {"role": "system", "content": "Agents: none."},
        ],
        "tools": [TOOLS[0] | {"input_schema": WEATHER | {"$schema": "https://json-schema.org/draft/2020-12/schema"}}],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "max_tokens": 32_000,
        "stream": True,
        "stop_sequences": ["e", "a"],  # so that the text of the model, which is random, is short
        "seed": 1,
    }
    headers = {**JSON, "anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219"}
    answer = thinker.ask("POST", f"{PATH}?beta=true", json.dumps(call).encode(), headers)
    assert answer.status == 200, answer.body
    told = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "A reminder.\nWhat is a block table?\nAgents: none."},
    ]
    function = {"name": "weather", "description": "It rains.", "parameters": call["tools"][0]["input_schema"]}
    same = {"messages": told, "tools": [{"type": "function", "function": function}]}
    same |= {"chat_template_kwargs": {"enable_thinking": True}}
    count = thinker.post("/tokenize", same).value["count"]
    assert num_input(added_up(answer.events)["usage"]) == count


# ---- errors ---------------------------------------------------------------------------------------------------------


def test_errors_have_the_form_that_clients_read(server: RunningServer) -> None:
    for path in (PATH, COUNT):
        asked = {"messages": MESSAGES} | (GREEDY if path == PATH else {})
        assert error_of(server.post(path, asked | {"model": "nobody"}))[:2] == (404, "not_found_error")
        status, kind, message = error_of(server.post(path, asked | {"what": 1}))
        assert (status, kind, message) == (400, "invalid_request_error", "what is not a field of this request")
        assert error_of(server.ask("GET", path, None, {}))[:2] == (405, "invalid_request_error")
        assert error_of(server.ask("POST", path, b" " * (9 << 20), JSON))[:2] == (413, "request_too_large")
        assert error_of(server.ask("POST", path, b"{}", {"content-type": "text/plain"}))[0] == 415
    assert error_of(server.get(f"{PATH}/batches"))[:2] == (404, "not_found_error")
    assert refused(server, temperature=-1)[2].startswith("temperature is -1.0; allowed")
    assert refused(server, stop_sequences=[""])[2].startswith("stop_sequences is ''; allowed: a string")
    assert refused(server, chat_template_kwargs={"what": 1})[2].startswith("chat_template_kwargs is 'what'; allowed")
    assert "error" in server.get("/v1/messages2").value and "type" not in server.get("/v1/messages2").value


def test_nothing_of_openais_form_is_on_these_paths_and_nothing_of_this_on_others(server: RunningServer) -> None:
    answer = server.post("/v1/chat/completions", {"messages": []})
    assert answer.value.keys() == {"error"} and "request-id" not in answer.headers


@pytest.mark.parametrize("path", [PATH, COUNT, f"{PATH}/unheard"])
def test_pages_of_other_sites_and_names_of_others_are_refused(server: RunningServer, path: str) -> None:
    for headers, status, kind in (
        ({"origin": "http://evil.example"}, 403, "permission_error"),
        ({"sec-fetch-site": "cross-site"}, 403, "permission_error"),
        ({"host": "evil.example"}, 421, "invalid_request_error"),
    ):
        for method in ("GET", "POST", "OPTIONS"):
            answer = server.ask(method, path, b"{}", {**JSON, **headers})
            assert error_of(answer)[:2] == (status, kind)
            assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_a_form_of_a_page_is_refused(server: RunningServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        answer = server.ask("POST", PATH, b'{"x": "="}', {"content-type": kind, "referer": "http://evil.example/"})
        assert error_of(answer)[:2] == (415, "invalid_request_error")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 200_000,
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"max_tokens": 1, "messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", '
        b'"name": "b", "input": ' + b'{"a":' * 400 + b"1" + b"}" * 400 + b"}]}]}",
        b'{"max_tokens": 1, "system": ' + b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"}",
        b'{"max_tokens": 1, "messages": [' + b"{}," * 40_000 + b"{}]}",
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": [' + b"{}," * 40_000 + b"{}]}]}",
        b'{"max_tokens": 1, "tools": [' + b"{}," * 40_000 + b"{}]}",
        b'{"max_tokens": ' + b"9" * 5000 + b"}",
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "a", "' + b"x" * 100_000 + b'": 1}]}',
        b'{"max_tokens": 1, "messages": [{"role": "' + b"x" * 100_000 + b'", "content": "a"}]}',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "' + b"x" * 100_000 + b'"}]}]}',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "'
        + b"x" * 100_000
        + b'"}]}]}',
        b'{"' + b"x" * 100_000 + b'": 1}',
        b'{"max_tokens": 1, "messages": [], "tool_choice": {"type": "' + b"x" * 100_000 + b'"}}',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"max_tokens": 1, "messages": [{"role": "user", "content": "\\u0000"}]}',
        b'{"max_tokens": 1, "messages": "\xff"}',
        b"",
    ],
)
def test_bodies_that_are_too_deep_too_many_or_none(server: RunningServer, body: bytes) -> None:
    for path in (PATH, COUNT):
        answer = server.ask("POST", path, body.replace(b'"max_tokens": 1, ', b"") if path == COUNT else body, JSON)
        status, kind, message = error_of(answer)
        assert (status, kind) == (400, "invalid_request_error")
        assert len(message) < 1200 and message.count("x") < 250


def test_a_text_that_no_context_holds_is_refused_before_it_is_encoded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[int]:
        raise AssertionError("a text was encoded that is too long whatever its tokens are")

    monkeypatch.setattr("quire.engine.text.control_text.ids_of", refuse)
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "\U0001f600" * 10_000}
    told = [*MESSAGES, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    for path in (PATH, COUNT):
        fields: Any = {"messages": told} | (GREEDY if path == PATH else {})
        status, kind, message = error_of(server.post(path, fields))
        assert (status, kind) == (400, "invalid_request_error")
        assert re.match(r"prompt is too long: about 25\d\d tokens > 2048 maximum; messages is ", message)


def test_many_calls_and_results_take_little_time(server: RunningServer) -> None:
    def calls(count: int) -> list[Any]:
        return [{"type": "tool_use", "id": f"c{number}", "name": "f", "input": {}} for number in range(count)]

    blocks = calls(3000)
    results = [{"type": "tool_result", "tool_use_id": each["id"]} for each in reversed(blocks)]
    told = [*MESSAGES, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    status, _, message = refused(server, messages=told)
    assert status == 400 and ("maximum context length" in message or "messages" in message)


# ---- keys -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    with running_server(api_key=("alice", "bob"), max_sequences_per_key=1) as running:
        yield running


def ask(server: RunningServer, headers: Mapping[str, str], path: str = PATH) -> Answer:
    fields = {"messages": MESSAGES} | (GREEDY if path != COUNT else {})
    return server.ask("POST", path, json.dumps(fields).encode(), {**JSON, **headers})


@pytest.mark.parametrize("path", [PATH, COUNT, "/v1/models", "/v1/models/guide"])
@pytest.mark.parametrize(
    ("headers", "is_known"),
    [
        ({}, False),
        ({"x-api-key": "alice"}, True),
        ({"X-Api-Key": " bob "}, True),
        ({"authorization": "Bearer alice"}, True),
        ({"x-api-key": "mallory"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": "Bearer alice"}, False),
        ({"x-api-key": "alice bob"}, False),
        ({"authorization": "Bearer mallory"}, False),
        ({"authorization": "Bearer alice", "x-api-key": "mallory"}, True),  # `authorization` decides
        ({"authorization": "Bearer mallory", "x-api-key": "alice"}, False),
        ({"authorization": "", "x-api-key": "alice"}, False),
        ({"authorization": "Basic alice", "x-api-key": "alice"}, False),
    ],
)
def test_keys_in_either_header(locked: RunningServer, path: str, headers: dict[str, str], is_known: bool) -> None:
    answer = ask(locked, headers, path) if path in (PATH, COUNT) else locked.ask("GET", path, None, headers)
    if is_known:
        assert answer.status == 200, answer.body
        return
    status, kind, message = answer.status, answer.error["type"], answer.error["message"]
    assert (status, kind) == (401, "authentication_error")
    assert message == "no valid API key; send the header Authorization: Bearer KEY or x-api-key: KEY"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_the_other_header_opens_these_paths_only(locked: RunningServer) -> None:
    for path in ("/v1/chat/completions", "/v1/models2", "/v1/load_lora_adapter", "/metrics", "/live", "/v1/messages2"):
        for method in ("GET", "POST"):
            answer = locked.ask(method, path, None, {"x-api-key": "alice"})
            assert (answer.status, "x-api-key" in answer.error["message"]) == (401, False)
    for path in ("/v1/models/../load_lora_adapter", "/v1/models/%2e%2e/live", "/v1/models//metrics"):
        assert locked.ask("GET", path, None, {"x-api-key": "alice"}).error["code"] == "model_not_found"
    assert locked.ask("POST", "/v1/models", b"{}", {**JSON, "x-api-key": "alice"}).status == 405
    assert error_of(locked.ask("GET", f"{PATH}/unheard", None, {"x-api-key": "alice"}))[0] == 404
    paths = locked.ask("GET", "/openapi.json", None, {"authorization": "Bearer alice"}).value["paths"]
    named = {path for path, operations in paths.items() if "x-api-key" in json.dumps(operations)}
    assert named == {PATH, COUNT, "/v1/models", "/v1/models/{model_id}"}


def test_a_key_may_be_there_once(locked: RunningServer) -> None:
    body = json.dumps({"messages": MESSAGES, **GREEDY}).encode()
    for names in (("x-api-key", "X-Api-Key"), ("authorization", "Authorization")):
        lines = "".join(f"{name}: {'Bearer ' * (name.lower() != 'x-api-key')}alice\r\n" for name in names)
        with closing(socket.create_connection(("127.0.0.1", locked.port), timeout=300)) as connection:
            lines += f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
            connection.sendall(f"POST {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + body)
            said = connection.makefile("rb").read()
        assert said.startswith(b"HTTP/1.1 400") and b'"type":"invalid_request_error"' in said


def test_each_key_has_its_own_cache_and_share(locked: RunningServer) -> None:
    system = "Each tenant has its own salt, so this prompt is computed once for each of them."
    body = json.dumps({"messages": MESSAGES, "system": system, **GREEDY}).encode()

    def cached(key: str) -> int:
        usage = locked.ask("POST", PATH, body, {**JSON, "x-api-key": key}).value["usage"]
        return int(usage["cache_read_input_tokens"])

    assert [cached(key) > 0 for key in ("alice", "alice", "bob", "bob")] == [False, True, False, True]
    first = locked.ask("POST", PATH, body[:-1] + b', "priority": -1}', {**JSON, "x-api-key": "alice"})
    assert error_of(first)[2] == "priority is -1; allowed: 0 or more with this API key"
    fields = {"messages": MESSAGES, "max_tokens": 1800, "ignore_eos": True, "stream": True}
    with closing(ask_and_leave(locked, fields, "x-api-key: alice")) as running:
        assert b"200 OK" in running.recv(4096)
        answer = ask(locked, {"x-api-key": "alice"})
        assert error_of(answer)[:2] == (429, "rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        assert ask(locked, {"x-api-key": "bob"}).status == 200
    locked.check()


# ---- calls under way ------------------------------------------------------------------------------------------------


def ask_and_leave(server: RunningServer, fields: dict[str, Any], *headers: str) -> socket.socket:
    body = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=300)
    lines = "".join(f"{line}\r\n" for line in ("Host: localhost", f"Content-Length: {len(body)}", *headers))
    connection.sendall(f"POST {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + body)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_gives_its_blocks_back(server: RunningServer, stream: bool) -> None:
    asked = {"messages": MESSAGES, "stream": stream, "max_tokens": 1900, "ignore_eos": True}
    with closing(ask_and_leave(server, asked)) as connection:
        end = time.monotonic() + 300
        while not server.llm.engine.scheduler.requests:
            assert time.monotonic() < end
            time.sleep(0.002)
        if stream:
            assert b"200 OK" in connection.recv(4096)
    server.check()


def test_a_stream_of_a_lost_engine_ends_with_an_event() -> None:
    with running_server(settings={"kv_memory": "64MiB"}) as server:
        asked = {"messages": MESSAGES, "stream": True, "max_tokens": 1900, "ignore_eos": True}
        with closing(ask_and_leave(server, asked, "Connection: close")) as connection:
            data = connection.recv(4096)
            assert b"200 OK" in data
            server.loop.call_soon_threadsafe(server.llm._streams.lose, "the engine is lost")
            data += connection.makefile("rb").read()
        last = data.rpartition(b"data: ")[2].partition(b"\n")[0]
        message = "the engine is starting or restarting; try again later"
        assert json.loads(last) == {"type": "error", "error": {"type": "overloaded_error", "message": message}}
        assert b"message_stop" not in data


def test_a_server_that_drains_is_overloaded(server: RunningServer) -> None:
    server.call(server.services.gate.drain)
    try:
        for path in (PATH, COUNT):
            fields: Any = {"messages": MESSAGES} | (GREEDY if path == PATH else {})
            answer = server.post(path, fields)
            assert error_of(answer)[:2] == (503, "overloaded_error")
            assert int(answer.headers["retry-after"]) >= 1
    finally:
        server.call(lambda: setattr(server.services.gate, "_is_draining", False))


def test_tokens_are_counted_as_everywhere(server: RunningServer) -> None:
    metrics = server.services.metrics

    def counts() -> tuple[int, int]:
        return metrics.num_prompt_tokens, metrics.num_generated_tokens

    before = server.call(counts)
    usage = server.post(PATH, {"messages": MESSAGES, **GREEDY}).value["usage"]
    assert server.post(COUNT, {"messages": MESSAGES}).status == 200
    after = server.call(counts)
    assert (after[0] - before[0], after[1] - before[1]) == (num_input(usage), usage["output_tokens"])
