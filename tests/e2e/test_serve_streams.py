"""Streams and answers in one piece say the same; clients that leave, requests that fail, and time that runs out."""

from __future__ import annotations

import json
import random
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from openai import APIError, InternalServerError

from support.server import JSON, RunningServer, running_server
from support.tiny_checkpoint import write_tiny_qwen3
from support.tiny_tokenizer import write_chatml

WORDS = ("hello", " the", " and", "é", "你", "😀", "lo", "\n", " user")
ENDLESS: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 100_000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_qwen3(
        tmp_path_factory.mktemp("model"),
        settings={"vocab_size": 384, "eos_token_id": 383, "max_position_embeddings": 200_000},
    )
    return write_chatml(folder)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(folder, settings={"kv_memory": "256MiB", "max_num_seqs": 16}) as running:
        yield running


@pytest.fixture(autouse=True)
def in_order(server: RunningServer) -> Iterator[None]:
    yield
    server.check()


# ---- the same either way --------------------------------------------------------------------------------------------


def random_fields(chance: random.Random) -> dict[str, Any]:
    def text() -> str:
        return "".join(chance.choices(WORDS, k=chance.randrange(1, 8)))

    fields: dict[str, Any] = {
        "max_tokens": chance.randrange(1, 20),
        "temperature": chance.choice([0, 0.8, 3.0]),
        "seed": chance.randrange(1000),
        "return_token_ids": True,
        "cache_salt": str(chance.random()),  # so that nothing of another call is in the cache
    }
    if chance.random() < 0.5:
        fields["n"] = chance.randrange(1, 4)
    if chance.random() < 0.5:
        fields["stop"] = chance.sample([*WORDS, "a", "e"], chance.randrange(1, 4))
        fields["include_stop_str_in_output"] = chance.random() < 0.3
    if chance.random() < 0.3:
        fields["ignore_eos"] = True
    if chance.random() < 0.3:
        fields["skip_special_tokens"] = False
    if chance.random() < 0.3:
        fields |= {"top_k": chance.randrange(1, 50), "top_p": 0.9, "repetition_penalty": 1.2}
    if chance.random() < 0.2:
        fields["best_of"] = fields.get("n", 1) + 1
    if chance.random() < 0.5:
        fields["messages"] = [{"role": "user", "content": text()}]
        if chance.random() < 0.5:
            fields |= {"logprobs": True, "top_logprobs": chance.randrange(4)}
        return fields
    prompts: list[Any] = [text() for _ in range(chance.randrange(1, 4))]
    if chance.random() < 0.3:
        prompts = [[chance.randrange(256) for _ in range(chance.randrange(1, 9))] for _ in prompts]
    fields["prompt"] = prompts if len(prompts) > 1 else prompts[0]
    if chance.random() < 0.5:
        fields["logprobs"] = chance.randrange(4)
    if chance.random() < 0.3:
        fields["echo"] = True
    return fields


def add_up(events: list[Any]) -> dict[int, dict[str, Any]]:
    """Return the choices of a stream as an answer in one piece would have them."""
    found: dict[int, dict[str, Any]] = defaultdict(
        lambda: {"text": "", "token_ids": [], "logprobs": None, "finish_reason": None, "stop_reason": None}
    )
    for event in events:
        for choice in event["choices"]:
            whole = found[choice["index"]]
            assert whole["finish_reason"] is None, "something came after the end"
            whole["text"] += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            whole["token_ids"] += choice.get("token_ids", [])
            for name in ("finish_reason", "stop_reason"):
                whole[name] = choice.get(name)
            for name, column in (choice["logprobs"] or {}).items():
                whole["logprobs"] = whole["logprobs"] or {}
                whole["logprobs"][name] = (whole["logprobs"].get(name) or []) + column if column is not None else None
    return found


@pytest.mark.parametrize("num_requests", [80, pytest.param(1000, marks=pytest.mark.long)])
def test_streams_say_what_answers_say(server: RunningServer, num_requests: int) -> None:
    chance = random.Random(num_requests)
    for number in range(num_requests):
        fields = random_fields(chance)
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        answer = server.post(path, fields)
        assert answer.status == 200, (number, fields, answer.body)
        asked = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": f"again {number}"}
        stream = server.post(path, fields | asked)
        assert stream.is_done
        *events, last = stream.events
        parts = add_up(events)
        for choice in answer.value["choices"]:
            part = parts.pop(choice["index"])
            assert part["text"] == (choice["text"] if "text" in choice else choice["message"]["content"]), fields
            for name in ("token_ids", "logprobs", "finish_reason", "stop_reason"):
                empty = (None, {}, {"content": [], "refusal": None})
                assert part[name] == choice[name] or (part[name] in empty and choice[name] in empty), (name, fields)
        assert not parts
        assert last["usage"] == answer.value["usage"], fields


# ---- clients that leave ---------------------------------------------------------------------------------------------


def send(server: RunningServer, path: str, fields: dict[str, Any]) -> socket.socket:
    """Send a call and leave it to the caller to read, or to go."""
    body = json.dumps(fields).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=300)
    fields = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{fields}".encode() + body)
    return connection


def wait_for(server: RunningServer, num_requests: int) -> None:
    end = time.monotonic() + 300
    while len(server.llm.engine.scheduler.requests) < num_requests:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "num_requests"),
    [({}, 1), ({"n": 3}, 1), ({"prompt": [[5], [6], [7]], "n": 2}, 3), ({"best_of": 3}, 1)],
)
def test_whoever_leaves_has_ended_all_of_the_call(
    server: RunningServer, fields: dict[str, Any], num_requests: int, stream: bool
) -> None:
    with closing(send(server, "/v1/completions", ENDLESS | {"stream": stream} | fields)) as connection:
        wait_for(server, num_requests)
        if stream and "best_of" not in fields:
            assert b"200 OK" in connection.recv(4096)
    server.check()


@pytest.mark.parametrize("fields", [{}, {"best_of": 3}, {"prompt": [[5], [6]], "n": 2}])
def test_a_call_waits_until_all_of_it_has_begun(server: RunningServer, fields: dict[str, Any]) -> None:
    gate = server.services.gate
    with closing(send(server, "/v1/completions", ENDLESS | fields)):
        end = time.monotonic() + 300
        while server.call(lambda: (gate.num_visits, gate.num_waiting_sequences)) != (1, 0):
            assert time.monotonic() < end
            time.sleep(0.005)


def test_leaving_while_others_stay_changes_nothing_for_them(server: RunningServer) -> None:
    fields = {"prompt": "hello the", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    alone = server.post("/v1/completions", fields).value["choices"]
    leaving = [send(server, "/v1/completions", ENDLESS | {"stream": True, "prompt": [i + 1]}) for i in range(6)]
    wait_for(server, 6)
    with closing(send(server, "/v1/completions", fields | {"stream": True})) as staying:
        for connection in leaving:
            connection.close()
        data = b""
        while b"[DONE]" not in data:
            data += staying.recv(65536)
    texts = [
        json.loads(line[6:])["choices"][0]["text"] for line in data.split(b"\n") if line.startswith(b'data: {"id"')
    ]
    assert "".join(texts) == alone[0]["text"]


def test_many_who_come_and_go(server: RunningServer) -> None:
    chance = random.Random(3)
    for _ in range(200):
        with closing(send(server, "/v1/completions", ENDLESS | {"stream": True})):
            time.sleep(chance.choice([0, 0, 0.001, 0.005]))
    server.check()


# ---- what goes wrong on the way -------------------------------------------------------------------------------------


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each step of an engine that starts take 10 ms longer, during which it computes nothing."""
    monkeypatch.setenv("QUIRE_FAILPOINTS", "sleep0.01:tokens=1")


@pytest.mark.usefixtures("slow_steps")
def test_time_runs_out(folder: Path) -> None:
    with running_server(folder, settings={"kv_memory": "64MiB"}, request_timeout_s=0.6) as server:
        answer = server.post("/v1/completions", ENDLESS | {"max_tokens": 20_000})
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert answer.headers["x-should-retry"] == "false"
        stream = server.post("/v1/completions", ENDLESS | {"max_tokens": 20_000, "stream": True})
        assert stream.status == 200
        assert stream.events[-1]["error"]["code"] == "deadline_exceeded"
        assert b"[DONE]" not in stream.body
        asked = {"input": "hello", "max_output_tokens": 20_000, "ignore_eos": True, "stream": True}
        events = server.post("/v1/responses", asked).events
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert (events[-1]["type"], events[-1]["code"]) == ("error", "deadline_exceeded")
        with server.client() as client, pytest.raises(APIError, match=r"within 0\.6 seconds"):
            extra = {"ignore_eos": True}
            model = server.services.model_names[0]
            list(client.responses.create(model=model, input="hello", stream=True, extra_body=extra))


@pytest.fixture
def failing(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> Event:
    """A tokenizer that decodes no token but those of the prompt while the event is set, as it is at first."""
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    has, fails = tokenizer.has, Event()
    fails.set()

    def fail(token_id: int) -> bool:
        if fails.is_set() and token_id not in ENDLESS["prompt"]:
            raise ZeroDivisionError("no such text")
        return has(token_id)

    monkeypatch.setattr(tokenizer, "has", fail)
    return fails


def test_a_request_that_fails_ends_alone_and_is_not_tried_again(server: RunningServer, failing: Event) -> None:
    fields = ENDLESS | {"max_tokens": 20_000}
    answer = server.post("/v1/completions", fields)
    assert (answer.status, answer.error["code"], answer.error["type"]) == (500, "generation_failed", "server_error")
    assert answer.headers["x-should-retry"] == "false"
    greedy: dict[str, Any] = {"temperature": 0, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    model = server.services.model_names[0]
    with server.client(max_retries=2) as client:
        for stream in (False, True):
            with pytest.raises(InternalServerError, match="no such text"):
                client.completions.create(model=model, prompt=[5, 6, 7], stream=stream, **greedy)


def test_a_stream_that_fails_once_it_has_begun_ends_with_an_event(server: RunningServer, failing: Event) -> None:
    failing.clear()
    with closing(send(server, "/v1/completions", ENDLESS | {"max_tokens": 20_000, "stream": True})) as connection:
        data = connection.recv(4096)
        assert data.startswith(b"HTTP/1.1 200")
        failing.set()
        while more := connection.recv(65536):
            data += more
            if b"generation_failed" in data:
                break
    assert b"generation_failed" in data
    assert b"[DONE]" not in data
    failing.clear()
    model = server.services.model_names[0]
    with server.client(max_retries=2) as client, pytest.raises(APIError, match="no such text"):
        extra = {"ignore_eos": True}
        for _ in client.completions.create(
            model=model, prompt=[5, 6, 7], stream=True, temperature=0, max_tokens=20_000, extra_body=extra
        ):
            failing.set()


def test_a_full_queue_answers_before_a_stream_begins(folder: Path) -> None:
    long = ENDLESS | {"max_tokens": 20_000, "stream": True}
    settings = {"max_num_seqs": 1, "kv_memory": "64MiB"}
    with (
        running_server(folder, settings=settings, max_queued_sequences=1) as server,
        closing(send(server, "/v1/completions", long)) as first,
    ):
        first.recv(4096)  # it has begun, and waits no longer
        with closing(send(server, "/v1/completions", long | {"prompt": [9]})):
            wait_for(server, 2)
            for stream in (False, True):
                answer = server.post("/v1/completions", ENDLESS | {"max_tokens": 5, "stream": stream})
                assert (answer.status, answer.error["code"]) == (503, "server_is_overloaded")
                assert int(answer.headers["retry-after"]) >= 1
                assert len(server.llm.engine.scheduler.requests) == 2  # both are still under way


def test_an_engine_that_is_lost_ends_streams_with_an_event(folder: Path) -> None:
    with running_server(folder, settings={"kv_memory": "64MiB"}) as server:
        with closing(send(server, "/v1/completions", ENDLESS | {"max_tokens": 20_000, "stream": True})) as connection:
            data = connection.recv(4096)
            server.loop.call_soon_threadsafe(server.llm._streams.lose, "the engine is lost")
            while b'data: {"error"' not in data:
                data += connection.recv(65536)
        assert b"engine_unavailable" in data


def test_a_reader_that_stops_reading_is_cut_off(folder: Path) -> None:
    fields = ENDLESS | {"max_tokens": 2_000, "stream": True, "logprobs": 20, "n": 16}
    with (
        running_server(folder, {"kv_memory": "64MiB"}, send_buffer=4096, write_timeout_s=0.3) as server,
        closing(send(server, "/v1/completions", fields)) as connection,
    ):
        connection.recv(1024)
        server.wait_until_idle(60)
        assert 0 < server.call(lambda: server.services.metrics.num_generated_tokens) < 16 * 2_000


def test_tokens_are_counted_as_they_come(server: RunningServer) -> None:
    def counts() -> tuple[int, int]:
        metrics = server.services.metrics
        return server.call(lambda: (metrics.num_prompt_tokens, metrics.num_generated_tokens))

    num_prompt, num_generated = counts()
    with closing(send(server, "/v1/completions", ENDLESS | {"stream": True})) as connection:
        connection.recv(4096)
        deadline = time.monotonic() + 60
        while counts()[1] < num_generated + 100 and time.monotonic() < deadline:
            connection.recv(65536)
        assert server.call(lambda: server.services.gate.num_visits) == 1
        assert counts()[0] == num_prompt + 3
        assert counts()[1] >= num_generated + 100


def test_the_document_is_whole(server: RunningServer) -> None:
    document = server.get("/openapi.json").value
    schemas = document["components"]["schemas"]

    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            if "$ref" in value:
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in references(document):
        assert reference.removeprefix("#/components/schemas/") in schemas
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/v1/detokenize"):
        answers = document["paths"][path]["post"]["responses"]
        assert answers.keys() == {"200", "4XX", "5XX"}
    for path, methods in document["paths"].items():
        if "get" in methods and "{" not in path:
            method = "HEAD" if path == "/live" else "GET"  # which never ends by itself
            assert server.ask(method, path, None, {}).status == 200
    assert JSON["content-type"] in document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]
