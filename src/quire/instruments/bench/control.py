"""`quire bench control`: the control plane, part by part."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import quire
from quire.instruments.bench.caching import measure_caching
from quire.instruments.bench.decode import DecodeOptions, measure_decode
from quire.instruments.bench.flags import add_choices, add_count
from quire.instruments.bench.growth import measure_growth
from quire.instruments.bench.peer import Peer, peer_at
from quire.instruments.bench.prefix import measure_pool, measure_prefix
from quire.instruments.bench.short_way import measure_short_way
from quire.reporting.report import Section
from quire.reporting.results import Tell, run_benchmark

PEER_SCRIPT = Path(quire.__file__).parents[2] / "../shared/bench/bench_control_vllm.py"


PARTS = ("decode", "growth", "prefix", "pool", "caching", "steps")
DESCRIPTION = (
    "Measure the control plane (scheduling, memory management and prefix caching) without a model. Every number "
    "is a median over several runs, with its spread. Needs an idle machine."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    parser.add_argument(
        "--peer-python", metavar="PATH", help="Python interpreter with vLLM installed; none: measure quire only"
    )
    parser.add_argument(
        "--peer-script",
        metavar="FILE",
        help="script that measures the peer; default: ../shared/bench/bench_control_vllm.py, relative to the root of "
        "the repository",
    )
    add_count(parser, "running", 256, "concurrent decode requests")
    add_count(parser, "prompt", 512, "tokens per prompt")
    add_count(parser, "blocks", 100_000, "blocks in the pool")
    add_count(parser, "steps", 300, "decode steps per run, at least 17")
    add_count(parser, "repeat", 5, "repetitions of each measurement")
    add_choices(parser, "only", PARTS, PARTS, "measure only these parts")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    return run_benchmark(options, "Control plane", lambda tell: _measure(options, tell))


def _measure(options: argparse.Namespace, tell: Tell) -> Iterator[Section]:
    parts = options.only
    if "decode" in parts:
        sizes = {name: getattr(options, name) for name in ("running", "prompt", "blocks", "steps")}
        with ExitStack() as stack:
            peer: Peer | None = None
            if options.peer_python:
                peer = stack.enter_context(peer_at(options.peer_python, options.peer_script or PEER_SCRIPT, sizes))
            else:
                tell("no --peer-python: the peer is not measured")
            yield measure_decode(DecodeOptions(**sizes, repeat=options.repeat), peer, tell)
    if "growth" in parts:
        yield measure_growth(options.repeat, tell)
    if "prefix" in parts:
        yield measure_prefix(options.repeat, tell)
    if "pool" in parts:
        yield measure_pool(options.repeat, tell)
    if "caching" in parts:
        yield measure_caching(options.repeat, tell)
    if "steps" in parts:
        yield measure_short_way(options.repeat, tell)
