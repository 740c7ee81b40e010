"""`quire bench`: measurements. This file only declares them; what they need is imported when one is run."""

from __future__ import annotations

import argparse
from typing import Any

PARTS = ("decode", "growth", "prefix", "pool", "caching")


def add_parser(subparsers: Any) -> None:
    """Declare `quire bench` and what can be measured. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "bench", help="measure quire", description="Measure a part of quire on this machine."
    )
    parser.set_defaults(run=lambda _: _show_help(parser))
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    control = benchmarks.add_parser(
        "control",
        help="the control plane: a step of decodes, prefix lookup, the block pool; beside vLLM's, where it is there",
        description="Measure the control plane: scheduling, memory management and prefix caching, without a model. "
        "Every number is a median over runs, with its spread. Needs a machine where nothing else runs.",
    )
    _add_control_options(control)
    control.set_defaults(run=_run_control)


def _add_control_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write everything, all samples included")
    parser.add_argument("--markdown", metavar="FILE", help="write the report, that is printed, to a file as well")
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter that has vLLM; none: only quire is measured")
    parser.add_argument(
        "--peer-script",
        metavar="FILE",
        help="measures the peer; default: ../shared/bench/bench_control_vllm.py, seen from the root of the repository",
    )
    for name, default, text in (
        ("running", 256, "decode requests that run at once"),
        ("prompt", 512, "tokens of a prompt"),
        ("blocks", 100_000, "blocks of the pool"),
        ("steps", 300, "decode steps in a run, 17 or more"),
        ("repeat", 5, "runs of every measurement"),
    ):
        parser.add_argument(f"--{name}", metavar="N", type=_count, default=default, help=f"{text}; default: {default}")
    parser.add_argument(
        "--only",
        metavar="PART",
        nargs="+",
        choices=PARTS,
        default=PARTS,
        help=f"measure only these parts: {', '.join(PARTS)}",
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _run_control(options: argparse.Namespace) -> int:
    from quire.cli.bench.control import run

    return run(options)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2
