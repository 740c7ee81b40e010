"""Names that quire does not know: what was meant is said, of commands, options, and the flags of other programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire.cli import main
from quire.cli.options import options_of
from quire.cli.server_options import COMMON, EXAMPLES
from quire.core.config import EngineConfig
from quire.engine.near_names import ELSEWHERE, NEEDLESS
from quire.serve.config import ServerConfig


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("srve", "did you mean serve?; see quire --help"),
        ("serve --kv-memry 1GiB", "did you mean --kv-memory?; see quire serve --help"),
        ("serve --ctx-size 4096", "unrecognized arguments: --ctx-size; quire calls it --max-model-len"),
        ("serve --gpu-memory-utilization=0.9", "quire calls it --kv-memory"),
        (
            "serve A --port 1 B --ctx-size 4096",
            "B --ctx-size 4096; quire calls it --max-model-len",
        ),
        ("serve m --revision main", "quire calls it MODEL@REVISION"),
        ("chat m --revision=main", "quire calls it MODEL@REVISION"),
        ("serve m --tool-call-parser hermes", "quire calls it --tool-format"),
        ("serve m --enable-auto-tool-choice", "quire calls it --tool-format"),
        ("serve m --lora-modules a=b", "quire calls it --adapter"),
        ("generate m --enable-lora", "quire calls it --adapter"),
        ("serve m --chat-template t.jinja", "quire takes the model's chat template, or that of --tokenizer FOLDER"),
        ("serve m --trust-remote-code", "quire never runs code that comes with a model"),
        ("serve m --load-format gguf", "quire tells the format from the files"),
        ("serve m --allowed-origins *", "quire calls it --cors-origin;"),
        ("serve m --ssl-certfile=a.pem", "quire calls it --tls-cert;"),
        ("serve m --ssl-keyfile a.pem", "quire calls it --tls-key;"),
        ("serve m --data-parallel-size 2", "quire calls it --replicas;"),
        ("serve m --tensor-parallel-size 2", "quire calls it --tensor-parallel;"),
        ("serve m --scheduling-policy fcfs", "quire calls it --policy;"),
        ("serve m --override-generation-config {}", "quire calls it --default-sampling;"),
        ("serve m --enforce-eager", "quire calls it --no-cuda-graphs;"),
        ("serve m --draft-model small", "quire calls it --speculation;"),
        ("serve m --embedding", "quire calls it --pooling;"),
        ("generate m --n-predict 5", "quire calls it --max-tokens;"),
        ("serve m --n-predict 5", "quire calls it --max-tokens, an option of other commands;"),
        ("generate m --alias x", "quire calls it --served-model-name, an option of other commands;"),
        (
            "generate m hi there",
            "unrecognized arguments: hi there; give a text with -p: -p 'hi there'; see quire generate",
        ),
        ("embed m hi", "give a text with -p: -p hi; see quire embed"),
        ("serve m -hf a/b", "quire takes the model without a flag: quire serve a/b"),
        ("run -hf a/b", "quire takes the model without a flag: quire chat a/b"),
        ("-hf a/b", "quire takes a command first, and the model without a flag: quire serve a/b"),
        ("pull llama3", 'quire: error: "llama3" is no model of the Hugging Face hub. quire pulls ORG/REPO, such as'),
        ("serve --model folder", "quire calls it MODEL, without a flag"),
        ("serve --model=folder --port 1", "quire calls it MODEL, without a flag"),
        ("serve -m folder", "quire calls it MODEL, without a flag"),
        ("bench kernels --only limit", "did you mean limits?"),
        ("bench kernls", "did you mean kernels?"),
        ("--versoin", "did you mean --version?"),
    ],
)
def test_what_was_meant_is_said(line: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert told in error


@pytest.mark.parametrize("line", ["xyzzy", "serve --xyzzy", "bench xyzzy"])
def test_nothing_is_guessed_of_what_is_like_nothing(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert "did you mean" not in error and "quire calls it" not in error


def test_the_names_of_other_programs_lead_to_options_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    flags: set[str] = set()
    for command in ("serve", "generate", "chat", "embed"):
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "\n  --tokenizer FOLDER" in shown, "a hint names it"
        flags |= {
            flag for line in re.findall(r"^  (-.*)", shown, re.MULTILINE) for flag in re.findall(r"--[\w-]+", line)
        }
    assert flags.isdisjoint(ELSEWHERE | NEEDLESS), "quire has an option of that name itself"
    assert {ours for ours in ELSEWHERE.values() if ours.startswith("--")} <= flags


def test_help_shows_ten_common_options_first_each_option_once_and_examples_that_are_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    groups = [shown.index(f"\n{title}:\n") for title in ("common options", "server", "engine", "examples")]
    assert groups == sorted(groups)
    flags = re.findall(r"^  (?:-\w, )?(--[\w\[\]-]+)", shown, re.MULTILINE)
    assert len(flags) == len(set(flags))
    assert {option.flag for option in (options_of(EngineConfig) | options_of(ServerConfig)).values()} - {
        flag.replace("[no-]", "") for flag in flags
    } == {"--model"}
    common = re.findall(r"^  (--[\w-]+)", shown[groups[0] : groups[1]], re.MULTILINE)
    assert common == [f"--{name.replace('_', '-')}" for name in COMMON]
    assert len(common) == 10
    for line in EXAMPLES.splitlines()[1:]:
        words = line.split()
        assert words[:2] == ["quire", "serve"]
        assert main(["config", "show", *words[2:]]) == 0


def test_an_unknown_model_is_answered_with_the_near_one_what_is_here_and_how_to_get_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, near in (("giude", " Did you mean guide?"), ("xyzzy", "")):
        assert main(["generate", name, "--prompt", "Hi"]) == 2
        error = capsys.readouterr().err
        assert f'No folder named "{name}".' in error
        assert f"Qwen/Qwen3-0.6B.{near} On this machine: guide" in error
        assert error.endswith("To fetch one: quire models pull ORGANISATION/NAME\n")
