"""Figures of reports: which sample a percentile is, which goals are met, and what is claimed on a busy machine."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.reporting import machine, results
from quire.reporting.machine import MAX_IDLE_LOAD, MAX_OTHERS, OthersMeter
from quire.reporting.report import Goal, Section, cell, render_goals, render_section, render_table
from quire.reporting.results import (
    NOT_CLAIMED,
    is_busy,
    is_loaded,
    render_results,
    rounded,
    run_benchmark,
    write_json,
    write_part,
)
from quire.reporting.samples import Summary, mean_of_last_periods, percentile, ratios, show, summarize
from quire.reporting.svg import page, text

TIMES = st.floats(1e-9, 1e9)
FACTS: dict[str, Any] = {
    "timed": True,
    "command": "quire bench x",
    "date": "2026-01-02T03:04+00:00",
    "machine": {"processor": "P", "memory": "1.0 GiB"},
    "load_average": 0.25,
    "versions": {"quire": "1"},
    "processors_busy_with_others": 0.05,
}


# ---- samples -------------------------------------------------------------------------------------------------------


@given(st.lists(TIMES, min_size=1, max_size=40), st.sampled_from([0.0, 0.25, 0.5, 0.9, 0.95, 0.99]))
def test_a_percentile_is_a_sample_with_that_share_of_all_before_it(times: list[float], share: float) -> None:
    found = percentile(times, share)
    assert found in times
    num_below = sum(time < found for time in times)
    num_up_to = sum(time <= found for time in times)
    assert num_below <= share * len(times) < num_up_to, "and no smaller sample has as many up to it"


@pytest.mark.parametrize(("share", "place"), [(0.0, 0), (0.499, 49), (0.5, 50), (0.989, 98), (0.99, 99), (0.999, 99)])
def test_percentiles_of_a_hundred(share: float, place: int) -> None:
    assert percentile([float(99 - index) for index in range(100)], share) == place


@given(st.lists(TIMES, min_size=1, max_size=20))
def test_a_summary_is_the_median_between_the_least_and_the_most(samples: list[float]) -> None:
    found = summarize(samples)
    assert (found.low, found.high) == (min(samples), max(samples))
    assert found.median == statistics.median(samples)


@given(st.lists(st.tuples(TIMES, TIMES), max_size=9))
def test_ratios_are_taken_run_by_run(runs: list[tuple[float, float]]) -> None:
    found = ratios([above for above, _ in runs], [below for _, below in runs])
    assert [ratio * below for ratio, (_, below) in zip(found, runs, strict=True)] == [
        pytest.approx(above) for above, _ in runs
    ]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [])


@given(st.integers(1, 7), st.integers(1, 5), st.integers(1, 7))
def test_the_mean_is_that_of_whole_periods_without_the_first_samples(period: int, num_periods: int, rest: int) -> None:
    num_first = 1 + (rest - 1) % period  # at least one is left out, and less than a period more
    cycle = [float(place**2) for place in range(period)]
    found = mean_of_last_periods([1e9] * num_first + cycle * num_periods, period)
    assert found == pytest.approx(statistics.fmean(cycle))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (math.nan, "nan"),
        (0.00012345, "0.000123"),
        (0.1, "0.100"),
        (0.999, "0.999"),
        (1.0, "1.00"),
        (9.994, "9.99"),
        (10.0, "10.0"),
        (99.94, "99.9"),
        (100.0, "100"),
        (999.4, "999"),
        (1000.0, "1,000"),
        (1234567.8, "1,234,568"),
        (-0.5, "-0.500"),
        (-1500.0, "-1,500"),
    ],
)
def test_numbers_have_three_digits_that_mean_something(value: float, shown: str) -> None:
    assert show(value) == shown


@given(st.floats(1e-6, 1e6))
def test_what_is_shown_is_off_by_half_a_unit_of_its_third_digit_at_most(value: float) -> None:
    assert float(show(value).replace(",", "")) == pytest.approx(value, rel=0.0051)


# ---- tables and goals ----------------------------------------------------------------------------------------------


def test_a_cell_is_the_median_with_its_spread_and_both_have_the_unit_once() -> None:
    assert cell(Summary(2.0, 1.5, 1000.0), " ms") == "2.00 ms (1.50–1,000)"
    assert cell(None, " ms") == "–"


WORDS = st.text(st.characters(exclude_characters="|\n\r", exclude_categories=["C", "Z"]), max_size=9)


@given(st.integers(1, 4).flatmap(lambda width: st.lists(st.lists(WORDS, min_size=width, max_size=width), min_size=1)))
def test_a_table_has_every_cell_in_its_place_and_columns_in_line(rows: list[list[str]]) -> None:
    lines = render_table(rows[0], rows[1:]).split("\n")
    cells = [[part.strip() for part in line[1:-1].split("|")] for line in lines]
    assert [cells[0], *cells[2:]] == rows
    assert all(set(part) <= {"-"} for part in cells[1])
    assert len({tuple(place for place, sign in enumerate(line) if sign == "|") for line in lines}) == 1
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("measured", "at_least", "is_met"),
    [(1.0, False, True), (0.99, False, True), (1.01, False, False), (1.0, True, True), (0.99, True, False)],
)
def test_a_goal_is_met_at_its_bound(measured: float, at_least: bool, is_met: bool) -> None:
    goal = Goal("speed", measured, 1.0, at_least) if at_least else Goal("speed", measured, 1.0)
    assert goal.is_met is is_met
    sign = "≥" if at_least else "≤"
    quiet, busy = (render_goals([goal], is_busy=busy).splitlines()[-1] for busy in (False, True))
    assert [part.strip() for part in quiet.split("|")[1:-1]] == [
        "speed",
        f"{sign} 1.00",
        show(measured),
        "yes" if is_met else "**no**",
    ]
    assert busy.split("|")[-2].strip() == ("yes, not claimed" if is_met else "**no**, not claimed")


def test_a_section_is_its_title_its_words_and_its_table() -> None:
    section = Section("Speed", "How fast.", ("what", "ms"), [("a step", "5")], {})
    assert render_section(section) == "## Speed\n\nHow fast.\n\n| what   | ms |\n| ------ | -- |\n| a step | 5  |"


# ---- what is claimed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "loaded", "busy"),
    [
        ({}, False, False),
        ({"load_average": MAX_IDLE_LOAD, "processors_busy_with_others": MAX_OTHERS}, False, False),
        ({"load_average": MAX_IDLE_LOAD + 0.01}, True, True),
        ({"processors_busy_with_others": MAX_OTHERS + 0.01}, False, True),
        ({"load_average": None, "processors_busy_with_others": None}, False, False),
        ({"load_average": 9.0, "processors_busy_with_others": 9.0, "timed": False}, False, False),
    ],
)
def test_nothing_is_claimed_where_others_ran_before_or_meanwhile(
    changed: dict[str, Any], loaded: bool, busy: bool
) -> None:
    facts = {**FACTS, **changed}
    assert (is_loaded(facts), is_busy(facts)) == (loaded, busy)
    goals = [Goal("speed", 1.0, 1.0)]
    report = render_results(facts, "Title", [Section("One", "Words.", ("a",), [("b",)], {}, goals)])
    assert (NOT_CLAIMED in report) is busy
    assert ("yes, not claimed" in report) is busy


def test_a_report_says_what_it_was_made_with_and_goals_stand_before_the_sections() -> None:
    sections = [Section("One", "Words.", ("a",), [("b",)], {}, [Goal("speed", 1.0, 1.0)])]
    report = render_results(FACTS, "Title", [*sections, Section("Two", "More.", ("a",), [("b",)], {})])
    assert report.startswith("# Title\n\nWritten by `quire bench x` on 2026-01-02T03:04+00:00. ")
    assert (
        "\n- machine: processor P, memory 1.0 GiB\n- versions: quire 1\n"
        "- load average at the start: 0.25; processors that other processes kept busy meanwhile: 0.05\n\n"
    ) in report
    assert re.findall("^## (.*)", report, re.MULTILINE) == ["Goals", "One", "Two"]
    unknown = render_results({**FACTS, "load_average": None}, "Title", [sections[0], sections[0]])
    assert "load average at the start: not known; " in unknown
    assert unknown.count("| speed") == 2, "the goals of all sections are in the table"
    assert "## Goals" not in render_results(FACTS, "Title", [Section("Two", "More.", ("a",), [("b",)], {})])


def test_a_part_takes_the_place_of_the_one_with_its_title_and_the_others_stay(tmp_path: Path) -> None:
    page_file = tmp_path / "RESULTS.md"
    write_part(page_file, "# One\n\n## Deep\n\nfirst")
    first = page_file.read_text(encoding="utf-8")
    assert first == results.HEAD + "\n## One\n\n### Deep\n\nfirst\n"
    write_part(page_file, "# Two\n\nsecond")
    both = page_file.read_text(encoding="utf-8")
    assert both == first + "\n## Two\n\nsecond\n"
    write_part(page_file, "# Two\n\nsecond")
    assert page_file.read_text(encoding="utf-8") == both, "what is written again changes nothing"
    write_part(str(page_file), "# One\n\nthird")
    assert page_file.read_text(encoding="utf-8") == results.HEAD + "\n## One\n\nthird\n\n## Two\n\nsecond\n"


def test_numbers_in_json_have_nine_decimals_and_the_rest_stays(tmp_path: Path) -> None:
    value = {"a": [1 / 3, 2, True, None, "x"], "b": ({"c": 1e-9}, 1.5e-10), "d": 10**20}
    expected = {"a": [0.333333333, 2, True, None, "x"], "b": [{"c": 1e-9}, 0.0], "d": 10**20}
    assert rounded(value) == expected
    write_json(tmp_path / "x.json", value)
    text_of_file = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert json.loads(text_of_file) == expected
    assert text_of_file.count("\n") == 1


@pytest.mark.parametrize("load", [0.1, 3.0])
def test_a_benchmark_prints_and_writes_what_was_asked_for(
    load: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "load_average", lambda: load)
    monkeypatch.setattr(results.OthersMeter, "num_busy", lambda self: 0.0)
    monkeypatch.setattr("sys.argv", ["quire", "bench", "a file"])
    options = argparse.Namespace(title=None, markdown=tmp_path / "x.md", json=tmp_path / "x.json")

    def measure(tell: results.Tell) -> list[Section]:
        tell("measuring")
        return [Section("One", "Words.", ("a",), [("b",)], {"s": [0.5]})]

    assert run_benchmark(options, "Given", measure, program="make") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# Given\n\nWritten by `make bench 'a file'` on ")
    assert f"quire bench: load average {load:.2f}\n" in shown.err
    assert shown.err.endswith("quire bench: measuring\n")
    assert ("warning: above 0.5" in shown.err) == (load > 0.5) == (NOT_CLAIMED in shown.out)
    assert "\n## Given\n" in (tmp_path / "x.md").read_text(encoding="utf-8")
    found = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    assert (found["samples"], found["load_average"], found["processors_busy_with_others"]) == (
        {"One": {"s": [0.5]}},
        load,
        0.0,
    )
    facts = results.start_facts()
    assert (facts["command"], facts["timed"], facts["load_average"]) == ("quire bench 'a file'", True, load)
    options = argparse.Namespace(title="Mine", markdown=None, json=None)
    assert run_benchmark(options, "Given", measure, timed=False) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("# Mine\n\nWritten by `quire bench 'a file'` on ")
    assert "warning" not in shown.err, "what is counted is the same on a busy machine"


def test_what_was_measured_outlasts_what_fails(tmp_path: Path) -> None:
    options = argparse.Namespace(title=None, markdown=tmp_path / "x.md", json=tmp_path / "x.json")

    def measure(tell: results.Tell) -> Iterator[Section]:
        for rows in ([("one",)], [("one",), ("two",)]):
            yield Section("Grows", "Words.", ("a",), rows, {"count": len(rows)})
        raise RuntimeError("the device is gone")

    with pytest.raises(RuntimeError, match="is gone"):
        run_benchmark(options, "Given", measure)
    page = (tmp_path / "x.md").read_text(encoding="utf-8")
    assert results.UNFINISHED in page and page.count("### Grows") == 1 and "| two |" in page
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["samples"] == {"Grows": {"count": 2}}


# ---- the machine ---------------------------------------------------------------------------------------------------


def test_others_are_what_processors_did_less_what_we_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc/stat: user, nice, system, idle, waiting, interrupts, soft interrupts, stolen, guests, in ticks."""
    moments = iter(
        [
            ("cpu  100 10 20 5000 700 3 4 5 60 6\ncpu0 9 9 9", os.times_result((1.0, 0.5, 0.25, 0.25, 100.0))),
            ("cpu  400 20 120 9000 900 13 14 25 90 9\ncpu0 9 9 9", os.times_result((2.0, 1.0, 0.5, 0.5, 102.0))),
        ]
    )
    monkeypatch.setattr(os, "sysconf", lambda name: 100)

    def read(path: Path, encoding: str) -> str:
        found, times = next(moments)
        monkeypatch.setattr(os, "times", lambda: times)
        assert (str(path), encoding) == ("/proc/stat", "utf-8")
        return found

    monkeypatch.setattr(Path, "read_text", read)
    # 300 + 10 + 100 + 10 + 10 + 20 ticks of 10 ms, less the two seconds of us and our children, over two seconds
    assert OthersMeter().num_busy() == pytest.approx((4.5 - 2.0) / 2.0)


def test_others_are_not_known_where_the_system_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = OthersMeter()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(OSError()))
    assert meter.num_busy() is None
    assert OthersMeter().num_busy() is None
    assert "memory" not in machine.describe_machine(), "what is missing is left out"


def test_the_machine_is_described_by_what_the_system_says(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/cpuinfo": "processor : 0\nmodel name\t: Made Up 5000\ncpu family : 6\nmodel : 106\nmodel name : other",
        "/proc/meminfo": "MemTotal:  25165824 kB\nMemFree: 1 kB",
    }
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: files[str(path)])
    found = machine.describe_machine()
    assert (found["processor"], found["processor_family_model"], found["memory"]) == (
        "Made Up 5000",
        "6/106",
        "24.0 GiB",
    )
    files["/proc/cpuinfo"] = "model name : Made Up 5000\ncpu family : 6"
    assert "processor_family_model" not in machine.describe_machine(), "half of it says nothing"


def test_a_plot_is_a_page_of_its_size_and_words_are_escaped() -> None:
    found = page(30, 20, [text(1.5, 2.0, "a < b & c", 'font-weight="bold"')], font_size=9)
    assert found.startswith('<svg xmlns="http://www.w3.org/2000/svg" width="30" height="20" viewBox="0 0 30 20" ')
    assert '<rect width="30" height="20" fill="#ffffff"/>\n' in found
    assert '<text x="1.5" y="2" fill="#222222" font-weight="bold">a &lt; b &amp; c</text>\n</svg>\n' in found
