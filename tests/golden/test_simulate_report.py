"""Small reports of `quire simulate`, to the letter, and what stands in its page. A change of decisions, times or words
shows here.

To write them anew after a change that was meant:

    .venv/bin/python tests/golden/test_simulate_report.py
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.cli import main

DATA = Path(__file__).parent / "data"
SMALL = ["simulate", "opt-13b", "--kv-memory", "1GiB", "--max-model-len", "512", "--dtype", "bfloat16"]
REPORTS = {
    "simulate_systems.txt": ["--rate", "6", "--duration", "10", "--what-if", "system=quire,vllm,orca_oracle,orca_max"],
    "simulate_chats.txt": ["--rate", "1", "--duration", "20", "--turns", "3", "--lengths", "alpaca", "--thinking", "2"],
    "simulate_beams.txt": ["--rate", "2", "--duration", "10", "--beams", "3", "--lengths", "alpaca", "--replicas", "2"],
    "simulate_users.txt": ["--users", "4", "--duration", "20", "--prompt-tokens", "60±30", "--output-tokens", "30"],
    "simulate_paper.txt": ["--paper", "setup", "memory", "prefix", "chat", "swap", "expectations", "--limit", "10"],
}
PAGE = "simulate_systems.txt"


@functools.cache
def run(name: str) -> tuple[str, str]:
    """Return the report of a run, and its page, if it has one."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as text:
        path = Path(folder) / "page.html"
        assert main([*SMALL, *REPORTS[name], *(("--html", str(path)) if name == PAGE else ())]) == 0
        return text.getvalue(), path.read_text(encoding="utf-8") if name == PAGE else ""


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_is_what_it_was(name: str) -> None:
    assert run(name)[0] == (DATA / name).read_text(encoding="utf-8")


def page_lines(name: str) -> Iterator[str]:
    """Yield what the page of a report shows: every chart and film, at some of its places."""
    content = json.loads(re.findall(r'<script type="application/json" id="content">(.*)</script>', run(name)[1])[0])
    for film in content["films"]:
        yield f"film, {len(film['times'])} frames of {film['numCells']} cells"
        yield from (f"  {caption}" for caption in film["captions"][::8])
    for chart in content["charts"]:
        yield f"{chart['title']} ({chart['kind']}, by {chart['x']['label']}, {len(chart['places'])} places)"
        for series in chart["series"]:
            yield f"  {series['name']}: " + " ".join(map(show, series["values"][::20]))


def show(value: Any) -> str:
    return "-" if value is None else f"{value:.3g}"


def test_a_page_shows_what_it_showed() -> None:
    assert list(page_lines(PAGE)) == (DATA / "simulate_page.txt").read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    for name in REPORTS:
        (DATA / name).write_text(run(name)[0], encoding="utf-8")
    (DATA / "simulate_page.txt").write_text("\n".join(page_lines(PAGE)) + "\n", encoding="utf-8")
