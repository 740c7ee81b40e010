"""What a step of decodes costs the processor: launched kernel by kernel, and recorded; on the driver that only counts.

    PYTHONPATH=src:tests python -m tests.gpu.host_time [--markdown FILE] [--repeat N]

Upload, plan of attention, launches, head and draws go their way as on a GPU, up to the driver. Tensors are of the CPU
and nearly empty, and products of the library are left out, so that what torch and Triton do around a kernel is what
takes time. Replays of recordings are left out as well: each is one call of the driver, of some tens of microseconds.
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
CASES = {
    "1 decode, context 600": [(600, 1)],
    "64 decodes, context 600": [(600, 1)] * 64,
    "256 decodes, context 600": [(600, 1)] * 256,
    "1 decode, context 20,000": [(20_000, 1)],
    "a prompt of 512": [(512, 512)],
    "64 decodes, context 600, and a chunk of 256": [*[(600, 1)] * 64, (1_000, 256)],
}
"""The sequences of a step: of how many tokens, and how many of them are computed."""
MOST_SHORT, MOST_TOKENS = 256, 600


def measure(folder: Path, repeat: int) -> list[tuple[str, list[float], list[float]]]:
    """Return for each case the seconds of steps that are launched, and of steps that are recorded."""
    from quire.compute.torch.draw_graphs import DrawGraphs
    from quire.compute.torch.graphs import StepGraphs
    from quire.compute.torch.rehearsal import filtered_draws

    counting_driver.use()
    torch.nn.functional.linear = _nothing  # type: ignore[assignment]
    torch.set_num_threads(1)
    runner, cache = counting_driver.engine(folder, max_num_seqs=MOST_SHORT)
    graphs = StepGraphs(runner._decoder, _NoReplay(), MOST_SHORT, MOST_TOKENS)
    graphs.record(cache.pairs(), runner._last_tokens)
    draw_graphs = DrawGraphs(runner._decoder, _NoReplay(), MOST_SHORT)
    draw_graphs.record(runner._last_tokens, torch.device("cpu"))
    found = []
    for name, sequences in CASES.items():
        inputs, draws = _step(sequences), filtered_draws(len(sequences))
        launch = partial(runner.launch, inputs, draws, cache)
        both: list[list[float]] = []
        for runner._graphs, runner._draw_graphs in ((None, None), (graphs, draw_graphs)):
            both.append([_timed(launch) for _ in range(repeat + 3)][3:])
        found.append((name, *both))
    return found  # type: ignore[return-value]


def _nothing(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return rows of any content, as the library of a GPU does: the product has not been computed yet."""
    return rows.new_empty((len(rows), len(weight)))


class _NoReplay:
    """Records what is computed, and does not do it again."""

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        return work(), lambda: None


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _step(sequences: list[tuple[int, int]]) -> Any:
    """Return a step of sequences, each in blocks of its own."""
    inputs = counting_driver.inputs_of(sequences, 1)
    [table] = inputs.block_tables
    table[:] = np.arange(table.size).reshape(table.shape)
    return inputs


def section(repeat: int) -> Section:
    """Measure in a process of its own, and return what came of it."""
    from support.tiny_checkpoint import write_tiny_qwen3

    with tempfile.TemporaryDirectory(prefix="quire-host-time-") as name:
        model = write_tiny_qwen3(Path(name) / "model", settings={"num_hidden_layers": NUM_LAYERS})
        found = counting_driver.run_alone("tests.gpu.host_time", str(model), str(repeat))
    rows = [(name, *(cell(summarize([1e3 * each for each in seconds])) for seconds in both)) for name, *both in found]
    text = (
        f"Milliseconds of one processor for a step in {NUM_LAYERS} layers: upload, plan of attention, "
        f"launches, head and draws. Median of {repeat} steps (min–max), by torch {torch.__version__} and Triton "
        f"{triton.__version__}. The driver counts and does nothing; products of the library and replays are left out."
    )
    header = ("step", "launched kernel by kernel, ms", "recorded, ms")
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
