"""`quire simulate --paper` with all its figures, on few requests: page, JSON, plot and results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quire.cli import main
from quire.simulate.paper import FIGURES

PUBLISHED = (
    *("15.7", "9.7", "60.1", "8.4×", "5.8×", "1.6 GiB", "800 KiB"),  # table 1, figure 11
    *("96.3 %", "38.2 %", "26.8 %", "20.4 %", "25.2 %", "17.9 %", "13.3 %", "up to 4 %"),  # figure 2
    *("30.42", "13.62", "9.81", "132.44", "72.75", "43.24", "2.2×", "4.3×"),  # figure 13
    *("1.7–2.7×", "2.7–8×", "up to 22×", "1.3×", "2.3×"),  # sections 6.2 and 6.3
    *("6.1 %", "9.8 %", "37.6 %", "55.2 %", "16.2 %", "30.5 %", "44.3 %", "66.3 %"),  # figure 15
    *("1.67×", "3.58×", "2×", "20–26 %", "16 to 128", "16 and 32", "up to 1.2×"),  # 6.4, 6.5, 7.1, 7.2, 7.3
    *("75 %", "87.5 %", "137", "200–300", "8–16K", "2–3", "4,194,304"),  # the document
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command writes."""
    folder = tmp_path_factory.mktemp("paper")
    files = {"html": "index.html", "json": "paper.json", "plot": "plot.svg", "markdown": "results.md"}
    options = [word for name, file in files.items() for word in (f"--{name}", str(folder / file))]
    assert main(["simulate", "opt-13b", "--paper", "--limit", "10", "--seed", "7", *options]) == 0
    return folder


def test_every_published_number_is_on_the_page_which_is_one_file(folder: Path) -> None:
    page = (folder / "index.html").read_text()
    assert [number for number in PUBLISHED if number not in page] == []
    assert "<dt>seed</dt><dd>7</dd>" in page
    assert page.count("<figure") == 9
    assert "default-src 'none'" in page
    assert re.findall(r"<[^>]*\s(?:src|href)=\"(?!#)", page) == []


def test_every_figure_is_in_the_json_with_what_was_published(folder: Path) -> None:
    figures = json.loads((folder / "paper.json").read_text())
    assert [figure["name"] for figure in figures] == list(FIGURES)
    assert all(figure["note"] and figure["tables"] for figure in figures)
    (oracle,) = (row for row in figures[1]["comparisons"] if row["what"] == "orca_oracle: token states")
    assert (oracle["published"], oracle["source"]) == ([38.2], "figure 2")


def test_the_plot_and_the_results_come_from_the_same_figures(folder: Path) -> None:
    assert ElementTree.fromstring((folder / "plot.svg").read_text()).tag.endswith("svg")
    results = (folder / "results.md").read_text()
    assert "## The paper, again" in results
    comparisons = [row for figure in json.loads((folder / "paper.json").read_text()) for row in figure["comparisons"]]
    assert sum(line.startswith("| ") for line in results.splitlines()) == len(comparisons) + 2
