"""What people of Ollama, llama-server, vLLM and Hugging Face type first: it works, or one line says quire's way."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest

from quire import cli
from quire.cli.habits import ALIASES, ANSWERS

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
    "quire rm --help": "usage: quire models rm",
    "quire bench serve --help": "usage: quire bench serve",
    "quire run guide --max-tokens 1": "from the cache",
    "quire doctor guide": "guide",
}
ANSWERED = {
    "quire ps": "/api/ps",
    "quire show smollm2": "quire doctor MODEL",
    "quire stop": "Ctrl-C",
    "quire create x": "quire chat PATH",
    "quire complete": "quire generate MODEL",
    "quire run-batch -i x": "quire generate MODEL",
    "quire collect-env": "quire doctor",
    "quire -m file.gguf -c 4096 -ngl 99": "quire serve file.gguf",
    "quire serve -hf org/name": "quire serve org/name",
    "quire serve guide --max-model-len 2048 --gpu-memory-utilization 0.9": "quire calls it --kv-memory",
    "quire serve guide -ngl 99": "quire calls it --device",
    "quire serve guide -c 4096": "quire calls it --max-model-len",
    "quire srve guide": "did you mean serve?",
    "quire pul x": "invalid choice: 'pul'",
}


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
