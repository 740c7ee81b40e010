"""Names that quire does not know: what was meant is said, of commands, options, and the flags of other programs."""

from __future__ import annotations

import pytest

from quire.cli import main
from quire.cli.near_names import ELSEWHERE


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("srve", "did you mean serve?; see quire --help"),
        ("serve --kv-memry 1GiB", "did you mean --kv-memory?; see quire serve --help"),
        ("serve --ctx-size 4096", "unrecognized arguments: --ctx-size; quire calls it --max-model-len"),
        ("serve --gpu-memory-utilization=0.9", "quire calls it --kv-memory"),
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
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for theirs, ours in ELSEWHERE.items():
        assert f"\n  {theirs} " not in shown, "it has an option of that name itself"
        if ours.startswith("--"):
            assert ours in shown.replace("--[no-]", "--no-").replace("--access-log, --no-access-log", "--no-access-log")
