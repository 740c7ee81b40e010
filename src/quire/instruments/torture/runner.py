"""Runs the cases one after another, prints a line for each, and the score at the end."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from quire.core.errors import InvalidValueError
from quire.instruments.torture.bad_inputs import BAD_INPUTS
from quire.instruments.torture.bodies import BODIES
from quire.instruments.torture.bundles import BUNDLES
from quire.instruments.torture.case import Case, CaseResult
from quire.instruments.torture.disk_faults import DISK_FAULTS
from quire.instruments.torture.faults import FAULTS
from quire.instruments.torture.grammars import GRAMMARS
from quire.instruments.torture.hangs import HANGS
from quire.instruments.torture.hostile_folders import FOLDERS
from quire.instruments.torture.hosts import HOSTS
from quire.instruments.torture.loads import LOADS
from quire.instruments.torture.paths import PATHS
from quire.instruments.torture.process_faults import PROCESS_FAULTS
from quire.instruments.torture.stage import Stage
from quire.instruments.torture.tenants import TENANTS
from quire.reporting.machine import OthersMeter
from quire.reporting.report import Section
from quire.reporting.results import render_results, start_facts, write_part

CASES: tuple[Case, ...] = (
    *sorted((*FAULTS, *PROCESS_FAULTS, *DISK_FAULTS, *HANGS), key=lambda case: int(case.number[1:])),
    *BAD_INPUTS,
    *FOLDERS,
    *BODIES,
    *HOSTS,
    *BUNDLES,
    *PATHS,
    *LOADS,
    *GRAMMARS,
    *TENANTS,
)
PARTS = (("F", "faults"), ("I", "refused"), ("L", "load"))


def run(options: argparse.Namespace) -> int:
    """Run the chosen cases; returns 0 if all have passed, else 1."""
    cases, facts, others = chosen(options.only), start_facts(timed=False), OthersMeter()
    print(f"quire torture: {len(cases)} cases", file=sys.stderr, flush=True)
    results = []
    with Stage(seed=options.seed, is_quick=options.quick) as stage:
        for case in cases:
            results.append(run_case(stage, case))
            print(results[-1], flush=True)
    line = figure(results, is_quick=options.quick)
    print(line)
    if options.json:
        content = {"figure": line, "quick": options.quick, "seed": options.seed, "cases": [asdict(r) for r in results]}
        Path(options.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        facts["processors_busy_with_others"] = others.num_busy()
        write_part(options.markdown, render_results(facts, options.title or "Torture", [_section(line, results)]))
    return 0 if all(result.has_passed for result in results) else 1


def _section(line: str, results: Sequence[CaseResult]) -> Section:
    rows = [(each.number, each.name, each.verdict, f"{each.seconds:.1f}", each.remark) for each in results]
    return Section("Cases", f"**{line}**", ("case", "what", "verdict", "s", "remark"), rows, {})


def chosen(only: Sequence[str]) -> list[Case]:
    """Return the cases of `--only`: by number, or by first letter; all cases without the flag.

    >>> [case.number for case in chosen(["L4", "f1"])]
    ['F1', 'L4']
    """
    wanted = {name.upper() for name in only}
    known = {case.number for case in CASES} | {letter for letter, _ in PARTS}
    for name in wanted - known:
        raise InvalidValueError("only", name, "the number of a case, such as F1, I7 or L4, or a letter: F, I or L")
    return [case for case in CASES if not wanted or case.number in wanted or case.number[0] in wanted]


def run_case(stage: Stage, case: Case) -> CaseResult:
    """Run one case; any exception is a failure."""
    stage.begin_case()
    started = time.monotonic()
    has_passed, remark = False, ""
    if case.run is not None:
        try:
            remark = case.run(stage)
            has_passed = True
        except Exception as error:  # an error in the case itself also counts as failed
            remark = f"{error or type(error).__name__}"
    books = stage.books
    return CaseResult(
        case.number,
        case.name,
        case.run is not None,
        has_passed,
        " ".join(remark.split()),
        time.monotonic() - started,
        books.num_leaked_blocks,
        books.num_changed,
    )


def figure(results: Sequence[CaseResult], *, is_quick: bool) -> str:
    """Return the score in one line. The totals include cases that did not run.

    >>> figure([CaseResult("F1", "a fault", True, True, "", 0.1, 0, 2)], is_quick=True)
    'faults 1/... · refused 0/... · load 0/... · blocks leaked 0 · bystanders changed 2 (quick; 1 of ... cases ran)'
    """
    parts = [
        f"{name} {sum(result.has_passed for result in results if result.number[0] == letter)}"
        f"/{sum(case.number[0] == letter for case in CASES)}"
        for letter, name in PARTS
    ]
    parts.append(f"blocks leaked {sum(result.num_leaked_blocks for result in results)}")
    parts.append(f"bystanders changed {sum(result.num_changed for result in results)}")
    remarks = ["quick"] if is_quick else []
    if len(results) < len(CASES):
        remarks.append(f"{len(results)} of {len(CASES)} cases ran")
    return " · ".join(parts) + (f" ({'; '.join(remarks)})" if remarks else "")
