"""Routing, in simulation: savings and costs of the product's router, compared with engines that take turns."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import Final

from quire.cli.simulate import add_parser
from quire.cli.simulate.progress import ProgressLine
from quire.cli.simulate.study import Study
from quire.core.clock import SystemClock
from quire.reporting.report import Goal, Section
from quire.reporting.results import Tell
from quire.reporting.samples import show
from quire.routing.router import LEAST_WORK, ROUND_ROBIN

ENGINES: Final = "llama-3.1-8b --hardware nvidia-h100 --device cuda --kv-memory 20GiB --replicas 4"
LOADS: Final = {
    "60 prefixes of 4,000 tokens": "--rate 24 --prefixes 60 --shared-tokens 4000",
    "chats of 4 turns": "--rate 8 --turns 4",
}
LEAST_SAVED: Final = 1.5
"""The least factor by which taking turns computes more prompt tokens."""


def measure_routing(duration_s: float, tell: Tell) -> Section:
    """Simulate each load with both routers."""
    rows, samples, goals = [], dict[str, object](), list[Goal]()
    for load, flags in LOADS.items():
        tell(f"routing: {load}, in turns and by the router")
        line = f"{ENGINES} --duration {duration_s:g} {flags} --what-if router={ROUND_ROBIN},{LEAST_WORK}"
        study = Study(_arguments(line), {}, ProgressLine(sys.stderr, SystemClock()))
        turns, work = map(study.simulate, study.variants)
        computed = [each.prompt_tokens - each.hit_tokens for each in (turns, work)]
        first_s = [each.latencies["ttft_s"] for each in (turns, work)]
        rows.append((load, "prompt tokens computed", *(f"{each:,}" for each in computed)))
        for name in ("p50", "p99"):
            rows.append(("", f"first token, {name}, ms", *(show(1e3 * getattr(each, name)) for each in first_s)))
        samples[load] = {
            "command": f"quire simulate {line}",
            "computed_tokens": computed,
            "first_token_s": list(map(asdict, first_s)),
        }
        goals += [
            Goal(f"{load}: prompt tokens computed, turns to router", computed[0] / computed[1], LEAST_SAVED, True),
            Goal(f"{load}: p99 of first tokens, router to turns", first_s[1].p99 / first_s[0].p99, 1.0),
        ]
    text = (
        f"Simulated, so the same on every machine: `quire simulate {ENGINES} --duration {duration_s:g}` with "
        f"{' and with '.join(f'`{flags}`' for flags in LOADS.values())}, seed 0."
    )
    return Section("Routing", text, ("load", "what", "in turns", "least work"), rows, samples, goals)


def _arguments(line: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["simulate", *line.split()])
