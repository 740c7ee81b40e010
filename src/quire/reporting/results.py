"""Results: the frame of every benchmark. It collects facts before the measurements, and writes the report after them.

A benchmark is a function that yields sections. The report has the load before the first one and the processors that
other processes kept busy until the last one; if the machine was busy, it states that, and goals read "not claimed".
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from quire.reporting.machine import (
    MAX_IDLE_LOAD,
    MAX_OTHERS,
    OthersMeter,
    describe_machine,
    describe_versions,
    load_average,
)
from quire.reporting.report import Section, render_goals, render_section

Tell = Callable[[str], None]

HEAD = "# Results\n\nEach part is written by the command that it names; see [README.md](README.md).\n"
MOST_OF_REASON = 160
UNFINISHED = "**Not finished: this part was written during the measurement.**"
NOT_CLAIMED = "**The machine was busy. Do not rely on numbers or ratios: load slows two processes differently.**"


def run_benchmark(
    options: argparse.Namespace,
    title: str,
    measure: Callable[[Tell], Iterable[Section]],
    *,
    timed: bool = True,
    program: str = "quire",
) -> int:
    """Measure, print, and write the requested files (options `json`, `markdown`, `title`); return the exit status.

    Files are written after every section, so that a later failure loses no results. A section replaces the previous one
    if it has the same title: a table that grows. `timed` is False for counts, which do not depend on the load.
    `program` is the command before the options.
    """
    facts, others = start_facts(timed=timed), OthersMeter()
    facts["command"] = f"{program} {shlex.join(sys.argv[1:])}"
    tell(f"load average {_number(facts['load_average'])}")
    if is_loaded(facts):
        tell(f"warning: above {MAX_IDLE_LOAD}, so other programs are running: do not rely on these numbers")
    sections: list[Section] = []

    def write(*, is_finished: bool) -> str:
        facts["processors_busy_with_others"] = others.num_busy()
        report = render_results(facts, options.title or title, sections, is_finished=is_finished)
        if options.markdown:
            write_part(options.markdown, report)
        if options.json:
            write_json(options.json, {**facts, "samples": {section.title: section.samples for section in sections}})
        return report

    for section in measure(tell):
        if sections and sections[-1].title == section.title:
            sections.pop()
        sections.append(section)
        write(is_finished=False)
    print(write(is_finished=True))
    return 0


def reason_of(error: Exception) -> str:
    r"""Return the error of a failed measurement, for a cell of its table.

    >>> reason_of(RuntimeError("out of\nmemory"))
    'RuntimeError: out of memory'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:MOST_OF_REASON]}"


def tell(text: str) -> None:
    """Print a progress message on stderr."""
    print(f"quire bench: {text}", file=sys.stderr, flush=True)


def start_facts(*, timed: bool = True) -> dict[str, Any]:
    """Return the facts before any measurement."""
    return {
        "timed": timed,
        "command": shlex.join(["quire", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": describe_machine(),
        "load_average": load_average(),
        "versions": describe_versions(),
    }


def is_loaded(facts: dict[str, Any]) -> bool:
    """Return whether other programs were running at the start of a timed benchmark."""
    return facts["timed"] and (facts["load_average"] or 0.0) > MAX_IDLE_LOAD


def is_busy(facts: dict[str, Any]) -> bool:
    """Return whether other programs were running at the start of, or during, a timed benchmark."""
    return is_loaded(facts) or (facts["timed"] and (facts["processors_busy_with_others"] or 0.0) > MAX_OTHERS)


def render_results(facts: dict[str, Any], title: str, sections: list[Section], *, is_finished: bool = True) -> str:
    """Return the report as Markdown."""
    lines = [
        f"# {title}",
        f"Written by `{facts['command']}` on {facts['date']}. What is measured, and how to measure it again: "
        "[benchmarks/README.md](README.md).",
        "\n".join(f"- {name}: {_pairs(facts[name])}" for name in ("machine", "versions"))
        + f"\n- load average at the start: {_number(facts['load_average'])}; processors that other processes kept busy "
        f"meanwhile: {_number(facts['processors_busy_with_others'])}",
    ]
    if not is_finished:
        lines.append(UNFINISHED)
    if is_busy(facts):
        lines.append(NOT_CLAIMED)
    goals = [goal for section in sections for goal in section.goals]
    if goals:
        lines.append(render_goals(goals, is_busy=is_busy(facts)))
    return "\n\n".join([*lines, *map(render_section, sections)])


def write_part(path: str | Path, report: str) -> None:
    """Write a report into a file of results, replacing the part with the same title, or at its end."""
    page, part = Path(path), re.sub(r"^#", "##", report, flags=re.MULTILINE) + "\n"
    head, *parts = re.split(
        r"^(?=## )", page.read_text(encoding="utf-8") if page.exists() else HEAD, flags=re.MULTILINE
    )
    found = {text.partition("\n")[0]: text.rstrip() + "\n" for text in parts}
    found[part.partition("\n")[0]] = part
    page.write_text("\n".join([head.rstrip() + "\n", *found.values()]), encoding="utf-8")


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as one line of JSON, with nine decimals."""
    Path(path).write_text(json.dumps(rounded(value)) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Return the same data with nine decimals: nanoseconds for times in seconds.

    >>> rounded({"seconds": [1 / 3]})
    {'seconds': [0.333333333]}
    """
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"


def _pairs(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
