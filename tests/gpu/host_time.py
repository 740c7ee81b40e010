"""What a step of decodes costs the processor: launched kernel by kernel, and recorded; on the driver that only counts.

    PYTHONPATH=src:tests python -m tests.gpu.host_time [--markdown FILE] [--repeat N]

Upload, plan of attention, launches, head and draws go their way as on a GPU, up to the driver. Tensors are of the CPU
and nearly empty, so that what torch and Triton do around a kernel is what takes time. The replay of a recording is left
out: it is one call of the driver, which takes it some tens of microseconds.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
from tests.gpu import counting_driver

from quire.reporting.machine import OthersMeter
from quire.reporting.report import Section, cell
from quire.reporting.results import render_results, start_facts, write_part
from quire.reporting.samples import summarize

NUM_LAYERS = 28
CASES = ((1, 600), (64, 600), (256, 600), (1, 20_000))
"""Decodes side by side, and the context of each."""


def measure(folder: Path, repeat: int) -> list[tuple[int, int, list[float], list[float]]]:
    """Return for each case the seconds of steps that are launched, and of steps that are recorded."""
    from quire.compute.torch.graphs import DecodeGraphs
    from quire.compute.torch.rehearsal import filtered_draws

    counting_driver.use()
    torch.set_num_threads(1)
    most = max(count for count, _ in CASES)
    runner, cache = counting_driver.engine(folder, max_num_seqs=most)
    graphs = DecodeGraphs(runner._decoder, _NoReplay(), most)
    graphs.record(cache.pairs(), torch.device("cpu"))
    found = []
    for count, context in CASES:
        inputs, draws = _decodes(count, context), filtered_draws(count)
        launch = partial(runner.launch, inputs, draws, cache)
        both: list[list[float]] = []
        for runner._graphs in (None, graphs):
            both.append([_timed(launch) for _ in range(repeat + 3)][3:])
        found.append((count, context, *both))
    return found  # type: ignore[return-value]


class _NoReplay:
    """Records what is computed, and does not do it again."""

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        return work(), lambda: None


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _decodes(count: int, context: int) -> Any:
    """Return so many decodes, each in blocks of its own."""
    inputs = counting_driver.inputs_of([(context, 1)] * count, 1)
    [table] = inputs.block_tables
    table[:] = np.arange(table.size).reshape(table.shape)
    return inputs


def section(repeat: int) -> Section:
    """Measure in a process of its own, and return what came of it."""
    from support.tiny_checkpoint import write_tiny_qwen3

    with tempfile.TemporaryDirectory(prefix="quire-host-time-") as name:
        model = write_tiny_qwen3(Path(name) / "model", settings={"num_hidden_layers": NUM_LAYERS})
        found = counting_driver.run_alone(Path(name), "tests.gpu.host_time", str(model), str(repeat))
    rows = [
        (f"{count:,} × {context:,}", *(cell(summarize([1e3 * each for each in seconds])) for seconds in both))
        for count, context, *both in found
    ]
    text = (
        f"Milliseconds of one processor for a step of decodes in {NUM_LAYERS} layers: upload, plan of attention, "
        f"launches, head and draws. Median of {repeat} steps (min–max), by torch {torch.__version__} and Triton "
        f"{triton.__version__}. The driver counts and does nothing, and a replay is left out."
    )
    header = ("decodes × context", "launched kernel by kernel, ms", "recorded, ms")
    return Section("Launching a step", text, header, rows, {"steps": found})


def main() -> int:
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        print(json.dumps(measure(Path(sys.argv[1]), int(sys.argv[2]))))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=25)
    parser.add_argument("--markdown", metavar="FILE", help="write a table as a part of this file")
    options = parser.parse_args()
    facts, others = start_facts(), OthersMeter()
    facts["command"] = shlex.join(["python", "-m", "tests.gpu.host_time", *sys.argv[1:]])
    sections = [section(options.repeat)]
    facts["processors_busy_with_others"] = others.num_busy()
    page = render_results(facts, "GPU: what a step costs the processor", sections)
    print(page)
    if options.markdown:
        write_part(options.markdown, page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
