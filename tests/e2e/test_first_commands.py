"""What people of Ollama, llama-server, vLLM and Hugging Face type first: it works, or one line says quire's way."""

from __future__ import annotations

import io
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import cli
from quire.cli.habits import ALIASES, ANSWERS
from support.server import RunningServer, running_server

MESSAGES = [{"role": "user", "content": "Hello!"}]

WORKS = {
    "quire --version": "quire 0",
    "quire version": "quire 0",
    "quire help": "usage: quire",
    "quire help serve": "usage: quire serve",
    "quire list": "NAME",
    "quire ls": "NAME",
    "quire models": "NAME",
    "quire run --help": "usage: quire chat",
    "quire pull --help": "usage: quire models pull",
    "quire download --help": "usage: quire models pull",
    "quire rm --help": "usage: quire models rm",
    "quire bench serve --help": "usage: quire bench serve",
    "quire run guide --max-tokens 1": "from the cache",
    "quire doctor guide": "guide",
    "quire run guide 'What is a block?' --max-tokens 1": "from the cache",
    "quire run guide --max-tokens 1 What is a block": "from the cache",
    "quire run guide --max-tokens 1 'What is' --seed 1 'a block?'": "from the cache",
}
ANSWERED = {
    "quire ps": "/api/ps",
    "quire show smollm2": "quire doctor MODEL",
    "quire stop": "Ctrl-C",
    "quire create x": "quire chat PATH",
    "quire complete": "quire generate MODEL",
    "quire run-batch -i x": "quire generate MODEL",
    "quire collect-env": "quire doctor",
    "quire env": "quire doctor",
    "quire cache ls": "quire models",
    "quire -m file.gguf -c 4096 -ngl 99": "quire serve file.gguf",
    "quire serve -hf org/name": "quire serve org/name",
    "quire serve guide --max-model-len 2048 --gpu-memory-utilization 0.9": "quire calls it --kv-memory",
    "quire serve guide -ngl 99": "quire calls it --device",
    "quire serve guide -c 4096": "quire calls it --max-model-len",
    "quire srve guide": "did you mean serve?",
    "quire pul x": "invalid choice: 'pul'",
}


CALLS = [
    # what is called, the status, and what the answer has
    ("GET /api/tags", None, 200, '"name":"guide:latest"'),
    ("GET /api/ps", None, 200, '"name":"guide:latest"'),
    ("POST /api/generate", {"model": "guide", "prompt": "Why is the sky blue?", "stream": False}, 200, '"done":true'),
    ("POST /api/chat", {"model": "guide", "messages": MESSAGES, "stream": False}, 200, '"role":"assistant"'),
    ("POST /api/pull", {"model": "llama3.2"}, 403, "quire models pull NAME"),
    ("GET /health", None, 200, "ready"),
    ("GET /props", None, 200, "default_generation_settings"),
    ("POST /completion", {"prompt": "Building a website", "n_predict": 8}, 200, '"stop":true'),
    ("GET /slots", None, 501, "GET /live"),
    ("GET /v1/models", None, 200, '"id":"guide"'),
    ("POST /v1/completions", {"model": "guide", "prompt": "San Francisco is a", "max_tokens": 7}, 200, '"text":'),
    ("POST /v1/chat/completions", {"model": "guide", "messages": MESSAGES}, 200, '"finish_reason":"'),
    ("POST /v1/messages", {"model": "guide", "messages": MESSAGES, "max_tokens": 9}, 200, '"type":"message"'),
    ("POST /v1/chat/completions", {"model": "gpt-4o", "messages": MESSAGES}, 404, "GET /v1/models lists"),
    ("POST /v1/embeddings", {"model": "guide", "input": "a"}, 400, "--pooling"),
    ("POST /generate", {"inputs": "What is Deep Learning?"}, 501, "/v1/completions"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.mark.parametrize(("call", "body", "status", "shown"), CALLS, ids=[f"{call[0]} {call[2]}" for call in CALLS])
def test_what_is_called_first(server: RunningServer, call: str, body: Any, status: int, shown: str) -> None:
    method, path = call.split()
    answer = server.get(path) if body is None else server.post(path, body)
    assert (answer.status, method) == (status, "GET" if body is None else "POST"), answer.body
    assert shown in answer.body.decode().replace('": ', '":')


def test_there_are_at_least_twenty_five() -> None:
    assert len(WORKS) + len(ANSWERED) >= 25


@pytest.mark.parametrize("line", WORKS)
def test_it_works(line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n"))
    assert cli.main(shlex.split(line)[1:]) == cli.DONE
    shown = capsys.readouterr()
    assert WORKS[line] in shown.out + shown.err


@pytest.mark.parametrize("line", ANSWERED)
def test_it_is_answered_in_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(shlex.split(line)[1:]) == cli.MISUSED
    shown = capsys.readouterr()
    assert shown.out == ""
    (error,) = shown.err.splitlines()
    assert ANSWERED[line] in error


def test_no_alias_hides_a_command() -> None:
    names = {command.name for command in cli.COMMANDS}
    assert not names & {*ALIASES, *ANSWERS}
    assert {words[0] for words in ALIASES.values()} <= names | {"--version"}


@pytest.mark.parametrize("name", ["QUIRE_KV_MEMRY", "QUIRE_API_KEYZ"])
def test_a_misspelt_variable_is_named_with_the_nearest(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "hidden")
    assert cli.main(["config", "show"]) == cli.MISUSED
    error = capsys.readouterr().err
    assert f"environment variable is '{name}'; allowed: names of settings; the closest is {name[:-1][:12]}" in error
    assert "hidden" not in error
    monkeypatch.delenv(name)
    monkeypatch.setenv("QUIRE_OF_MONKS", "1")  # another program's
    assert cli.main(["config", "show"]) == cli.DONE


def test_each_exit_status_is_in_the_help_and_in_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == cli.DONE
    shown = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "run-a-model.md").read_text()
    for status, meaning in cli.STATUSES.items():
        assert f"  {status:<5}{meaning}\n" in shown
        assert f"| {status} | {meaning} |" in page
