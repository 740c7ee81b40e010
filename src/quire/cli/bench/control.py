"""`quire bench control`: runs the parts, prints the report, writes the files."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import quire
from quire.cli.bench.caching import measure_caching
from quire.cli.bench.decode import DecodeOptions, measure_decode
from quire.cli.bench.growth import measure_growth
from quire.cli.bench.machine import (
    MAX_IDLE_LOAD,
    MAX_OTHERS,
    OthersMeter,
    describe_machine,
    describe_versions,
    load_average,
)
from quire.cli.bench.peer import Peer, peer_at
from quire.cli.bench.prefix import measure_pool, measure_prefix
from quire.cli.bench.report import Section, render_goals, render_section

PEER_SCRIPT = Path(quire.__file__).parents[2] / "../shared/bench/bench_control_vllm.py"


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""
    facts, others = _facts(), OthersMeter()
    load = facts["load_average"]
    _tell(f"load average {_number(load)}")
    if (load or 0.0) > MAX_IDLE_LOAD:
        _tell(f"warning: above {MAX_IDLE_LOAD}, so something else is running: these numbers are no claim")
    sections = list(_measure(options))
    facts["processors_busy_with_others"] = num_busy = others.num_busy()
    is_busy = (load or 0.0) > MAX_IDLE_LOAD or (num_busy or 0.0) > MAX_OTHERS
    report = _render(facts, sections, is_busy=is_busy)
    print(report)
    if options.markdown:
        _write(options.markdown, report)
    if options.json:
        samples = {section.title: section.samples for section in sections}
        _write(options.json, json.dumps(_rounded({**facts, "samples": samples})))
    return 0


def _tell(text: str) -> None:
    print(f"quire bench: {text}", file=sys.stderr, flush=True)


def _write(path: str, text: str) -> None:
    Path(path).write_text(text + "\n", encoding="utf-8")


def _rounded(value: Any) -> Any:
    """The same data with nine decimals: nanoseconds, where it is seconds."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 9) if isinstance(value, float) else value


def _facts() -> dict[str, Any]:
    return {
        "command": shlex.join(["quire", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "machine": describe_machine(),
        "load_average": load_average(),
        "versions": describe_versions(),
    }


def _measure(options: argparse.Namespace) -> Iterator[Section]:
    parts = options.only
    if "decode" in parts:
        sizes = {name: getattr(options, name) for name in ("running", "prompt", "blocks", "steps")}
        with ExitStack() as stack:
            peer: Peer | None = None
            if options.peer_python:
                peer = stack.enter_context(peer_at(options.peer_python, options.peer_script or PEER_SCRIPT, sizes))
            else:
                _tell("no --peer-python: the peer is not measured")
            yield measure_decode(DecodeOptions(**sizes, repeat=options.repeat), peer, _tell)
    if "growth" in parts:
        yield measure_growth(options.repeat, _tell)
    if "prefix" in parts:
        yield measure_prefix(options.repeat, _tell)
    if "pool" in parts:
        yield measure_pool(options.repeat, _tell)
    if "caching" in parts:
        yield measure_caching(options.repeat, _tell)


def _render(facts: dict[str, Any], sections: list[Section], *, is_busy: bool) -> str:
    lines = [
        "# Control plane: results",
        f"Written by `{facts['command']}` on {facts['date']}. What is measured, and how to measure it again: "
        "[benchmarks/README.md](README.md).",
        "\n".join(f"- {name}: {_pairs(facts[name])}" for name in ("machine", "versions"))
        + f"\n- load average at the start: {_number(facts['load_average'])}; processors that other processes kept busy "
        f"meanwhile: {_number(facts['processors_busy_with_others'])}",
    ]
    if is_busy:
        lines.append(
            "**The machine was busy. Neither numbers nor ratios are a claim: two processes suffer differently.**"
        )
    goals = [goal for section in sections for goal in section.goals]
    if goals:
        lines.append(render_goals(goals, is_busy=is_busy))
    return "\n\n".join([*lines, *map(render_section, sections)])


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.2f}"


def _pairs(facts: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
