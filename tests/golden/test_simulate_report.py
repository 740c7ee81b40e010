"""Small reports of `quire simulate`, to the letter. A change of decisions, times or words shows here.

To write them anew after a change that was meant:

    .venv/bin/python tests/golden/test_simulate_report.py
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest

from quire.cli import main

DATA = Path(__file__).parent / "data"
SMALL = ["simulate", "opt-13b", "--kv-memory", "1GiB", "--max-model-len", "512", "--dtype", "bfloat16"]
REPORTS = {
    "simulate_systems.txt": ["--rate", "6", "--duration", "20", "--what-if", "system=quire,vllm,orca_oracle,orca_max"],
    "simulate_chats.txt": ["--rate", "1", "--duration", "20", "--turns", "3", "--lengths", "alpaca", "--thinking", "2"],
    "simulate_beams.txt": ["--rate", "2", "--duration", "10", "--beams", "3", "--lengths", "alpaca", "--replicas", "2"],
    "simulate_users.txt": ["--users", "4", "--duration", "20", "--prompt-tokens", "60±30", "--output-tokens", "30"],
}


def report(name: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert main([*SMALL, *REPORTS[name]]) == 0
    return text.getvalue()


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_what_it_was(name: str) -> None:
    assert report(name) == (DATA / name).read_text(encoding="utf-8")


if __name__ == "__main__":
    for name in REPORTS:
        (DATA / name).write_text(report(name), encoding="utf-8")
