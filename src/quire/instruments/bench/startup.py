"""`quire bench startup`: the time from process start to a model that answers; and the size of the installation.

process start ── imports ──► plan ── weights ──► ready ── prompt ──► first token
                             └────── load ─────┘
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from quire.cli.machine_limits import MachineLimits
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.granted import usable_cores
from quire.core.python_process import start_python
from quire.instruments.bench.asked_process import ended
from quire.instruments.bench.flags import add_count, add_model_options, add_size
from quire.instruments.bench.installation import installed_bytes
from quire.instruments.bench.shapes import measured_config
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import summarize

GUIDE_COMMAND = ("-m", "quire", "generate", "guide", "--quiet", "--raw", "--prompt", "A block is", "--max-tokens", "8")
MAX_FIRST_TOKEN_S = 1.0
MAX_BESIDE_BYTES = 400_000_000
MAX_INSTALLED_BYTES = 60_000_000


@dataclass(frozen=True, slots=True)
class LoadRun:
    """One process that loads a model; `bandwidth` was measured right before."""

    ready_s: float  # from process start
    load_s: float
    weight_bytes: int
    peak_bytes: int | None
    bandwidth: float

    @property
    def to_reading(self) -> float:
        """The time to load, divided by the time to read the weights once."""
        return self.load_s * self.bandwidth / self.weight_bytes


DESCRIPTION = (
    "Measure the guide's time to first token and a model's time to ready, each in new processes, and the size of an "
    "installation."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_count(parser, "repeat", 5, "processes of each kind")
    add_size(parser, "read-size", "1GiB", "amount of memory to read when measuring bandwidth")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        yield measure_first_token(options.repeat, tell)
        with measured_config(options) as config:
            yield measure_load(config, options.repeat, options.read_size, tell)
        yield measure_installation()

    return run_benchmark(options, "Start-up", measure)


def measure_first_token(repeat: int, tell: Tell) -> Section:
    """Measure the guide's time to its first text."""
    first_s, end_s = [], []
    for index in range(repeat):
        tell(f"the guide: run {index + 1} of {repeat}")
        first, text, end = _run(GUIDE_COMMAND)
        if not text.strip():
            raise ExecutionError("the guide printed nothing")
        first_s.append(first)
        end_s.append(end)
    rows = [
        ("process start to the first token, s", cell(summarize(first_s))),
        ("process start to its end, s", cell(summarize(end_s))),
    ]
    goals = [Goal("the guide: process start to the first token, s", summarize(first_s).median, MAX_FIRST_TOKEN_S)]
    text = f"`python {' '.join(GUIDE_COMMAND[:4])}` of 8 tokens. Median of {repeat} processes (min–max)."
    samples: dict[str, object] = {"first_token_s": first_s, "end_s": end_s}
    return Section("The guide", text, ("what", "value"), rows, samples, goals)


def measure_load(config: EngineConfig, repeat: int, read_size: int, tell: Tell) -> Section:
    """Measure a model's time to ready, and its peak memory until then."""
    limits = MachineLimits(config.num_threads or usable_cores(), read_size)
    runs = []
    for index in range(repeat):
        tell(f"loading {config.model}: run {index + 1} of {repeat}")
        runs.append(load_once(config, limits.bandwidth()))
    beside = [(run.peak_bytes - run.weight_bytes) / 1e6 for run in runs if run.peak_bytes is not None]
    rows = [
        ("load to ready, s", cell(summarize([run.load_s for run in runs]))),
        ("process start to ready, s", cell(summarize([run.ready_s for run in runs]))),
        ("load to the time to read the weights once", cell(summarize([run.to_reading for run in runs]), "×")),
        ("peak without the weights, MB", cell(summarize(beside) if beside else None)),
    ]
    text = (
        f"{config.model}, {runs[0].weight_bytes / 1e6:,.0f} MB of weights. KV memory is not written yet. Median of "
        f"{repeat} processes (min–max)."
    )
    goals = [Goal("peak without the weights, MB", summarize(beside).median, MAX_BESIDE_BYTES / 1e6)] if beside else []
    samples: dict[str, object] = {"runs": [asdict(run) for run in runs]}
    return Section("Loading", text, ("what", "value"), rows, samples, goals)


def measure_installation() -> Section:
    """Add up the size of an installation of quire, without numpy."""
    found = installed_bytes()
    total = sum(found.values())
    rows = [(name, f"{size / 1e6:.1f}") for name, size in sorted(found.items(), key=lambda each: -each[1])]
    text = (
        "The files of quire and of its requirements except numpy, as installed in this environment. If quire is used "
        "in place, its source files count."
    )
    goals = [Goal("installed without numpy, MB", total / 1e6, MAX_INSTALLED_BYTES / 1e6)]
    samples: dict[str, object] = {"bytes": found}
    return Section("Installation", text, ("what", "MB"), [*rows, ("total", f"{total / 1e6:.1f}")], samples, goals)


def load_once(config: EngineConfig, bandwidth: float) -> LoadRun:
    """Load a model in a new process; `bandwidth` was measured right before."""
    first_s, text, _ = _run(["-m", "quire.instruments.bench.load_probe", json.dumps(asdict(config))])
    found = json.loads(text)
    return LoadRun(first_s, found["load_s"], found["weight_bytes"], found["peak_bytes"], bandwidth)


def _run(arguments: Sequence[str]) -> tuple[float, str, float]:
    """Return the seconds until a process prints, its output, and the seconds until it ends."""
    started = time.perf_counter()
    with start_python(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        begin = process.stdout.read(1)
        first_s = time.perf_counter() - started
        text = (begin + process.stdout.read()).decode(errors="replace")
        errors = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise ended(process.returncode, errors)
    return first_s, text, time.perf_counter() - started
