"""Bodies that cost more than their sender: what is refused before it is read, held or made into objects."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from quire.serve.read.body_budget import FREE_BYTES
from support.bare_server import Answer, BareServer, read_answer, serving
from support.server import JSON, RunningServer, running_server
from support.waiting import wait_until

KIB, MEBIBYTE = 1 << 10, 1 << 20
KEYS = ("sesame-1", "sesame-2")
BODY = FREE_BYTES + 40 * KIB


def head(length: int | None, key: str = "") -> bytes:
    lines = ["POST /v1/measure HTTP/1.1", "Host: localhost"]
    lines.append("Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}")
    return "\r\n".join([*lines, *([f"Authorization: Bearer {key}"] if key else []), "", ""]).encode()


def held(server: BareServer) -> int:
    return server.services.bodies.held_bytes


# ---- bytes that are held --------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[BareServer]:
    """A server that holds two bodies of 64 KiB."""
    with serving(max_body=64 * KIB, max_bodies=81 * KIB) as running:
        wait_until(lambda: running.services.gate.is_ready)
        yield running
        wait_until(lambda: held(running) == 0)
        running.services.bodies.check()


def post(server: BareServer, num_bytes: int, key: str = "") -> Answer:
    return server.ask("POST", "/v1/measure", bytes(num_bytes), **({"Authorization": f"Bearer {key}"} if key else {}))


def test_who_announces_much_and_sends_nothing_takes_no_room(server: BareServer) -> None:
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(server.connected()).sendall(head(64 * KIB))
        assert post(server, 64 * KIB).value == {"length": 64 * KIB}


@pytest.mark.parametrize("is_chunked", [False, True])
def test_slow_senders_hold_what_they_have_sent_and_small_calls_go_on(server: BareServer, is_chunked: bool) -> None:
    piece = bytes(BODY)
    with ExitStack() as stack:
        for index in range(2):
            sender = stack.enter_context(server.connected())
            sender.sendall(head(None) + b"%x\r\n" % len(piece) + piece if is_chunked else head(BODY + 1) + piece)
            wait_until(lambda: held(server) == 40 * KIB * (index + 1))  # noqa: B023 - called at once
        answer = post(server, BODY)
        assert (answer.status, answer.error["code"]) == (503, "server_is_overloaded")
        assert answer.headers["retry-after"]
        assert post(server, FREE_BYTES).value == {"length": FREE_BYTES}
        assert server.get("/livez").status == 200
        with server.connected() as third:  # nothing is announced, so it is refused where it goes too far
            third.sendall(head(None) + b"%x\r\n" % len(piece) + piece)
            assert read_answer(third).status == 503
        assert held(server) == 80 * KIB
    wait_until(lambda: held(server) == 0)
    assert post(server, BODY).status == 200


def test_a_key_fills_its_share_and_not_that_of_another() -> None:
    sizes: dict[str, Any] = {"max_body": 64 * KIB, "max_bodies": 200 * KIB, "max_bodies_per_key": 64 * KIB}
    with serving(api_key=KEYS, open_metrics=True, **sizes) as server:
        wait_until(lambda: server.services.gate.is_ready)
        with server.connected() as sender:
            sender.sendall(head(BODY + 1, KEYS[0]) + bytes(BODY))
            wait_until(lambda: held(server) == 40 * KIB)
            answer = post(server, BODY, KEYS[0])
            assert (answer.status, answer.error["code"]) == (429, "slow_down")
            assert answer.headers["retry-after"]
            assert post(server, BODY, KEYS[1]).status == 200
        wait_until(lambda: held(server) == 0)
        metrics = server.get("/metrics").body.decode()
        assert "quire_body_rejections_total 1" in metrics
        assert f"quire_body_bytes_max {200 * KIB}" in metrics


def test_nothing_of_a_body_is_read_without_a_key() -> None:
    with serving(api_key=KEYS, max_body=64 * KIB, max_bodies=64 * KIB) as server, server.connected() as sender:
        wait_until(lambda: server.services.gate.is_ready)
        sender.sendall(head(BODY + 1) + bytes(BODY))
        assert read_answer(sender).status == 401
        assert held(server) == 0


# ---- bytes and values of one body -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guide() -> Iterator[RunningServer]:
    with running_server(settings={"max_model_len": 256}) as running:
        yield running


def limit_of(server: RunningServer, path: str) -> int:
    answer = server.ask("POST", path, b" " * (9 * MEBIBYTE), JSON)
    assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    assert "send less" in answer.error["message"]
    found = re.search(r"limit of (\d+) bytes", answer.error["message"])
    assert found is not None
    return int(found[1])


def test_a_body_may_be_as_large_as_its_prompts_and_the_context_make_it(guide: RunningServer) -> None:
    limits = {path: limit_of(guide, path) for path in ("/detokenize", "/tokenize", "/v1/completions")}
    assert limits["/tokenize"] == limit_of(guide, "/v1/chat/completions") == limit_of(guide, "/v1/responses")
    large = guide.ask("POST", "/v1/messages", b" " * (9 * MEBIBYTE), JSON).error["message"]
    assert f"limit of {limits['/tokenize']} bytes" in large
    assert MEBIBYTE < limits["/detokenize"] < limits["/tokenize"] < limits["/v1/completions"] < 3 * MEBIBYTE
    [text] = guide.post("/v1/completions", {"prompt": "\U0001f600" * 60, "max_tokens": 1}).value["choices"]
    assert text["finish_reason"] == "length"


def test_text_that_no_context_holds_is_refused_before_it_is_encoded(
    guide: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> list[int]:
        raise AssertionError("a text was encoded that is too long whatever its tokens are")

    monkeypatch.setattr("quire.engine.text.tokenizer.ids_of", refuse)
    monkeypatch.setattr("quire.engine.text.control_text.ids_of", refuse)
    text = "\U0001f600" * 1025
    message = {"role": "user", "content": text}
    for path, fields, param in (
        ("/tokenize", {"prompt": text}, "prompt"),
        ("/tokenize", {"messages": [message]}, "messages"),
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": [text]}, "prompt"),
        ("/v1/completions", {"prompt": text, "truncate_prompt_tokens": 4}, "prompt"),
        ("/v1/chat/completions", {"messages": [message]}, "messages"),
        ("/v1/responses", {"input": text}, "input"),
    ):
        answer = guide.post(path, fields)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded"), (path, answer.body)
        assert answer.error["param"] == param
        assert "maximum context length" in answer.error["message"]


def call_of(arguments: str) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a", "metadata": [[]] * 40_000}, "metadata"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(40_000)}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["b"] * 40_000}, "bad_words"),
        ("/v1/completions", {"prompt": ["b"] * 40_000}, "prompt"),
        ("/v1/completions", {"prompt": [[1]] * 40_000}, "prompt"),
        ("/v1/completions", {"prompt": "a", "stop": ["b"] * 40_000}, "stop"),
        ("/v1/chat/completions", {"messages": [{}] * 40_000}, "messages"),
        ("/v1/chat/completions", {"messages": [[[]] * 40_000]}, "messages"),
        ("/v1/chat/completions", {"messages": [call_of("[" + "[]," * 40_000 + "0]")]}, "messages"),
        ("/v1/chat/completions", {"messages": [call_of("[" + "[]," * 9_000 + "0]")] * 4}, "messages"),
        ("/v1/chat/completions", {"messages": [], "tools": [{}] * 40_000}, "tools"),
        ("/v1/responses", {"input": [{}] * 40_000}, "input"),
        ("/detokenize", {"tokens": [1] * 257}, "tokens"),
        ("/detokenize", {"tokens": [1] * 100_000}, "tokens"),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": "[" * 300_000}}, "structured_outputs"),
    ],
)
def test_values_are_counted_before_they_are_made(
    guide: RunningServer, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = guide.ask("POST", path, json.dumps(fields, separators=(",", ":")).encode(), JSON)
    assert answer.status == 400, answer.body[:200]
    assert answer.error["param"].startswith(param)
    assert len(answer.body) < 600


def test_line_feeds_are_no_grammar_and_take_no_time(guide: RunningServer) -> None:
    fields = {"prompt": "a", "structured_outputs": {"grammar": "\n" * 100_000}}  # two minutes, when each was a start
    assert guide.post("/v1/completions", fields).status == 400


LONG = "x" * 100_000
ECHOED: list[tuple[str, dict[str, Any]]] = [
    *(("/v1/completions", {"prompt": "a", name: LONG}) for name in ("n", "stop", "cache_salt", "request_id", "what")),
    *(("/v1/completions", {"prompt": "a", name: LONG}) for name in ("truncation_side", "early_stopping", "suffix")),
    ("/v1/completions", {"prompt": "a", LONG: 1}),
    ("/v1/completions", {"prompt": "a", "model": LONG}),
    ("/v1/completions", {"prompt": "a", "logit_bias": {LONG: 1}}),
    ("/v1/completions", {"prompt": "a", "bad_words": [LONG]}),
    ("/v1/completions", {"prompt": [1, LONG]}),
    ("/v1/completions", {"prompt": "a", "response_format": {"type": LONG}}),
    ("/v1/completions", {"prompt": "a", "stream_options": {LONG: True}}),
    ("/v1/completions", {"prompt": "a", "structured_outputs": {"json": LONG}}),
    ("/v1/chat/completions", {"messages": [{"role": LONG, "content": "a"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {LONG: 1}}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tool_choice": LONG}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": LONG}),
    ("/v1/chat/completions", {"messages": [call_of(LONG)]}),
    ("/v1/responses", {"input": "a", "include": [LONG]}),
    ("/v1/responses", {"input": "a", "reasoning": {LONG: 1}}),
    ("/v1/responses", {"input": "a", "stream_options": {LONG: 1}}),
    ("/v1/responses", {"input": [{"type": LONG}]}),
    ("/v1/responses", {"input": [{"role": "user", "content": "a", LONG: 1}]}),
    ("/v1/responses", {"input": "a", "truncation": LONG}),
    ("/tokenize", {"prompt": {LONG: LONG}}),
    ("/detokenize", {"tokens": [LONG]}),
]


@pytest.mark.parametrize(("path", "fields"), ECHOED, ids=[f"{path} {str(fields)[:60]}" for path, fields in ECHOED])
def test_an_error_shows_little_of_what_came(guide: RunningServer, path: str, fields: dict[str, Any]) -> None:
    for body in (json.dumps(fields), json.dumps(fields)[:-1] + f', "{LONG}": 1, "{LONG}": 2}}'):
        answer = guide.ask("POST", path, body.encode(), JSON)
        assert answer.status in (400, 404)
        assert answer.body.count(b"x") < 250, answer.body[:300]
        assert len(answer.body) < 1500


@pytest.mark.parametrize(
    "number", ["9" * 4000, "9" * 5000, "9" * 500_000, "-" + "9" * 500_000, "1e999999999", "0." + "3" * 500_000]
)
def test_huge_numbers(guide: RunningServer, number: str) -> None:
    for name in ("n", "temperature", "seed", "max_tokens"):
        answer = guide.ask(
            "POST", "/v1/completions", b'{"prompt": "a", "%s": %s}' % (name.encode(), number.encode()), JSON
        )
        assert answer.status == 400 or (name, number[:2]) == ("temperature", "0.")
        assert len(answer.body) < 1000


LARGE = "a" * 20_000
FREED: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/completions", {"prompt": "a", "user": LARGE, "n": "many"}, 400),  # parsed in a thread
    ("/v1/completions", {"prompt": LARGE}, 400),
    ("/v1/completions", {"prompt": [5] * 300}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": LARGE}]}, 400),
    ("/v1/embeddings", {"input": "a"}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True}, 200),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}, 200),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2, "stream": True}, 200),
]


@pytest.mark.parametrize(
    ("path", "fields", "status"), FREED, ids=[f"{path} {str(each)[:30]}" for path, each, _ in FREED]
)
def test_a_call_is_freed_at_once(guide: RunningServer, path: str, fields: dict[str, Any], status: int) -> None:
    """Without a collection of cycles, for which the bodies and prompts of many calls would wait."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        assert [guide.post(path, fields).status for _ in range(3)] == [status] * 3
        gc.collect()
        kinds = {type(each) for each in gc.garbage}
        assert not [each for each in kinds if issubclass(each, Exception) or each.__module__.startswith("quire.")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
