"""The end of `make test`: what was tested, what was skipped and why, what was left out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test-summary"


def summary(folder: Path, **runs: str) -> tuple[int, list[str], str]:
    for name, tests in runs.items():
        counts = f'tests="{tests.count("<testcase")}" failures="{tests.count("<failure")}" errors="0" time="12.3"'
        (folder / f"{name}.xml").write_text(f"<testsuites><testsuite {counts}>{tests}</testsuite></testsuites>")
    done = subprocess.run([sys.executable, SCRIPT, folder], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


def skipped(reason: str) -> str:
    return f'<testcase><skipped type="pytest.skip" message="{reason}">file.py:1: {reason}</skipped></testcase>'


def test_counts_and_reasons_stand_in_one_place(tmp_path: Path) -> None:
    status, lines, errors = summary(
        tmp_path, suite="<testcase/>" * 3, transformers="<testcase/>", gpu="<testcase/>" + 2 * skipped("needs a GPU")
    )
    assert (status, errors) == (0, "")
    assert [line.split() for line in lines[1:4]] == [
        ["the", "suite", "3", "passed", "0", "skipped", "12", "s"],
        ["against", "transformers", "1", "passed", "0", "skipped", "12", "s"],
        ["of", "the", "GPU", "engine", "1", "passed", "2", "skipped", "12", "s"],
    ]
    assert lines[4:] == ["skipped:    2  needs a GPU", "5 passed, 0 failed, 2 skipped"]


def test_runs_that_were_left_out_are_named(tmp_path: Path) -> None:
    status, lines, _ = summary(tmp_path, suite="<testcase/>")
    assert status == 0
    assert [line.split("LEFT OUT; ")[1] for line in lines if "LEFT OUT" in line] == [
        "make test-transformers runs them",
        "make test-gpu runs them",
    ]


def test_a_skip_for_anything_but_hardware_fails(tmp_path: Path) -> None:
    status, lines, errors = summary(tmp_path, suite="<testcase/>" + skipped("could not import 'torch'"))
    assert status == 1
    assert lines[-1] == "1 passed, 0 failed, 1 skipped"
    assert errors == "a test can only be skipped for missing hardware, not because: could not import 'torch'\n"


def test_a_failure_fails(tmp_path: Path) -> None:
    status, lines, _ = summary(tmp_path, suite="<testcase/><testcase><failure/></testcase>")
    assert (status, lines[-1]) == (1, "1 passed, 1 failed, 0 skipped")
