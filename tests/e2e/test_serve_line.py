"""A call goes through the rooms of the server in a line: read, parse, translate, admit, run, render, each once."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import quire.serve
from support.server import RunningServer, running_server

SERVE = f"{Path(quire.serve.__file__).parent}/"
LINE = ["read", "parse", "translate", "admit", "run", "render"]
ROOMS = {
    "read/body.py": "read",
    "schemas/parse.py": "parse",
    "translate/": "translate",
    "run/generation.py": "run",
    "run/prompts.py": "run",  # run/request.py is no room: it is the value that goes from one to the next
    "render/": "render",
}
MESSAGES = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "now"}}]
MESSAGE_TOOLS = [{"name": "now", "input_schema": {"type": "object"}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
CALLS = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "chat with logprobs": ("/v1/chat/completions", {"messages": MESSAGES, "logprobs": True, "n": 2}),
    "chat, cut": ("/v1/chat/completions", {"messages": MESSAGES, "truncate_prompt_tokens": 8}),
    "chat with tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": TOOLS}),
    "chat in JSON": ("/v1/chat/completions", {"messages": MESSAGES, "response_format": SCHEMA}),
    "completion": ("/v1/completions", {"prompt": "a"}),
    "completions": ("/v1/completions", {"prompt": ["a", "b"], "echo": True, "logprobs": 1}),
    "completion, plain": ("/v1/completions", {"prompt": "a", "add_special_tokens": False}),
    "Ollama's chat": ("/api/chat", {"messages": MESSAGES, "format": "json"}),
    "Ollama's chat with tools": ("/api/chat", {"messages": MESSAGES, "tools": TOOLS, "logprobs": True}),
    "Ollama's prompt": ("/api/generate", {"prompt": "Hi", "system": "Be brief."}),
    "Ollama's prompt, raw": ("/api/generate", {"prompt": "Hi", "raw": True}),
    "message": ("/v1/messages", {"messages": MESSAGES, "system": "Be brief."}),
    "message with tools": ("/v1/messages", {"messages": MESSAGES, "tools": MESSAGE_TOOLS}),
    "response": ("/v1/responses", {"input": "Hi"}),
    "response with tools": ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", "name": "now"}]}),
}


def short(path: str, *, stream: bool) -> dict[str, Any]:
    """The fields by which a call asks for three tokens, in a stream or not."""
    if path.startswith("/api/"):
        return {"options": {"num_predict": 3}, "stream": stream}
    return {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 3, "stream": stream}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(tool_format="hermes") as running:
        yield running


def followed(server: RunningServer, path: str, fields: dict[str, Any]) -> tuple[int, list[str], list[str]]:
    """The status of an answer, the rooms that its call has gone through, and the functions that began in them."""
    frames: dict[int, FrameType] = {}  # kept, because a coroutine is entered each time that it goes on
    rooms: list[str] = []
    functions: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or id(frame) in frames or not code.co_filename.startswith(SERVE):
            return
        frames[id(frame)] = frame
        file = code.co_filename.removeprefix(SERVE)
        room = next((room for start, room in ROOMS.items() if file.startswith(start)), None)
        if file == "gate.py" and code.co_name == "enter":
            room = "admit"
        if room is not None:
            rooms.append(room)
            functions.append(code.co_name)

    server.call(lambda: sys.setprofile(note))
    try:
        answer = server.post(path, fields)
    finally:
        server.call(lambda: sys.setprofile(None))
    return answer.status, [room for room, _ in groupby(rooms)], functions


@pytest.mark.parametrize("name", CALLS)
def test_a_call_visits_each_room_once_and_in_order(server: RunningServer, name: str) -> None:
    path, fields = CALLS[name]
    status, rooms, _ = followed(server, path, {**fields, **short(path, stream=False)})
    assert (status, rooms) == (200, LINE)


@pytest.mark.parametrize("name", CALLS)
def test_once_a_stream_flows_it_only_runs_and_renders(server: RunningServer, name: str) -> None:
    path, fields = CALLS[name]
    status, rooms, _ = followed(server, path, {**fields, **short(path, stream=True)})
    assert status == 200
    assert rooms[: len(LINE)] == LINE
    assert set(rooms[len(LINE) :]) == {"run", "render"}


@pytest.mark.parametrize(
    ("fields", "rooms"),
    [
        ({"messages": MESSAGES, "what": 1}, LINE[:2]),  # no field of a chat
        ({"messages": []}, LINE[:3]),
        ({"messages": MESSAGES, "temperature": -1}, [*LINE[:5], "translate"]),  # found by the engine's door
        ({"messages": [{"role": "user", "content": "a" * 9_000}]}, [*LINE[:5], "translate"]),
    ],
)
def test_a_refused_call_stops_where_it_is_refused(
    server: RunningServer, fields: dict[str, Any], rooms: list[str]
) -> None:
    status, visited, functions = followed(server, "/v1/chat/completions", fields)
    assert (status, visited) == (400, rooms)
    if rooms[-2:] == ["run", "translate"]:
        assert functions[-2:] == ["named", "renamed"]  # the one place that knows the client's name for it


def test_a_call_without_a_place_is_not_read(server: RunningServer) -> None:
    server.call(server.services.gate.drain)
    try:
        assert followed(server, "/v1/chat/completions", {"messages": MESSAGES})[:2] == (503, [])
    finally:
        server.call(lambda: setattr(server.services.gate, "_is_draining", False))


def test_tokens_are_counted_without_the_gate(server: RunningServer) -> None:
    for path, fields in (
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
    ):
        _, rooms, _ = followed(server, path, fields)
        assert rooms == [room for room in LINE if room != "admit"]
