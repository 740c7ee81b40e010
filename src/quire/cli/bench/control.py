"""`quire bench control`: the control plane, part by part."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import quire
from quire.cli.bench.caching import measure_caching
from quire.cli.bench.decode import DecodeOptions, measure_decode
from quire.cli.bench.growth import measure_growth
from quire.cli.bench.page import Tell, run_page
from quire.cli.bench.peer import Peer, peer_at
from quire.cli.bench.prefix import measure_pool, measure_prefix
from quire.cli.bench.report import Section

PEER_SCRIPT = Path(quire.__file__).parents[2] / "../shared/bench/bench_control_vllm.py"


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write what was asked for; returns the exit status."""
    return run_page(options, "Control plane", lambda tell: _measure(options, tell))


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
