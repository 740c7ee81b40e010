"""`quire bench gpu-engine`: whole runs on a GPU, compared with the roofline of the same requests.

    requests ──► the engine itself            seconds from handing over all requests to the last token
            └──► the simulator, same scheduler, steps at the device's measured ceilings: the bound

The ceilings are measured in the same run. The runs are those that `quire bench gpu-predictions` predicts. Work of the
processor while the device computes costs nothing. If the device has to wait for the processor, the results of a step
are ready before the engine asks for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from quire.cli.engine_options import add_engine_options, engine_config
from quire.cli.machine_limits import limits_of
from quire.cli.model_shapes import find_settings, find_shape
from quire.compute.models.config_file import CONFIG_FILE
from quire.compute.torch.device import choose_device, look
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.instruments.bench.flags import add_choices, add_count, add_size
from quire.instruments.bench.gpu_predictions import bound_s, ceilings, even_requests, nano_requests
from quire.instruments.bench.measured_engine import MeasuredEngine, Run
from quire.instruments.bench.shapes import write_random_weights
from quire.instruments.bench.throughput import describe_engine
from quire.instruments.bench.workload_file import Workload, WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import summarize
from quire.simulate.workload.offered import OfferedRequest

MAX_UNHIDDEN_SHARE: Final = 5.0
SINGLE_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Case:
    """Requests to a model, all at once, and the share of their roofline that is the goal."""

    name: str
    model: str
    requests: tuple[OfferedRequest, ...]
    min_share: float
    max_unhidden_share: float | None = None
    temperature: float | None = None

    @property
    def workload(self) -> Workload:
        """The requests as an engine takes them."""
        requests = (
            WorkloadRequest(tuple(each.prompt), each.num_output_tokens, temperature=self.temperature)
            for each in self.requests
        )
        return Workload(self.name, tuple(requests))


def cases() -> tuple[Case, ...]:
    """Return the cases to measure."""
    single = replace(even_requests(1024)[0], num_output_tokens=SINGLE_TOKENS)
    return (
        Case("nano-vllm", "qwen3-0.6b", tuple(nano_requests()), 58.0, MAX_UNHIDDEN_SHARE, temperature=0.6),
        Case("single-0.6b", "qwen3-0.6b", (single,), 40.0),
        Case("256x1k-1k", "llama-3.1-8b", tuple(even_requests(1024)), 65.0),
        Case("single-8b", "llama-3.1-8b", (single,), 70.0),
    )


GPU_MODELS = ("qwen3-0.6b", "llama-3.1-8b")
DESCRIPTION = (
    "Run the nano-vllm benchmark, 256 prompts of 1,024 tokens, and single streams, with random weights, and "
    "compare each with the roofline of the same requests, from device limits measured right before. Needs "
    "--device cuda."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_choices(parser, "only", GPU_MODELS, GPU_MODELS, "measure only these models")
    parser.add_argument("--folder", metavar="FOLDER", help="folder that keeps weights and workloads for the next run")
    add_count(parser, "repeat", 5, "repetitions of each measurement")
    add_size(parser, "read-size", "4GiB", "amount of memory to read when measuring bandwidth")
    add_engine_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    config = engine_config(options, os.environ)
    if "model" in options:
        raise InvalidConfigError("model", config.model, f"none: --only chooses among {', '.join(options.only)}")
    if config.device == "cuda":
        choose_device(look(os.environ), "cuda")
    wanted = [case for case in cases() if case.model in options.only]

    def measure(tell: Tell) -> Iterator[Section]:
        for model in dict.fromkeys(case.model for case in wanted):
            with checkpoint(model, options.folder, tell) as folder:
                own = [case for case in wanted if case.model == model]
                if options.folder:
                    write_workloads(own, Path(options.folder))
                yield from measure_model(replace(config, model=str(folder)), own, options, tell)

    return run_benchmark(options, "GPU engine", measure)


@contextmanager
def checkpoint(model: str, parent: str | None, tell: Tell) -> Iterator[Path]:
    """Return a folder with random weights of a model; with a parent, the folder is kept and reused."""
    with tempfile.TemporaryDirectory(prefix="quire-bench-") as temporary:
        folder = Path(parent or temporary) / model
        if not folder.exists():
            tell(f"writing random weights of {model}")
            folder.mkdir(parents=True)
            shutil.copyfile(find_settings(model).where(CONFIG_FILE), folder / CONFIG_FILE)
            write_random_weights(folder)
        yield folder


def write_workloads(own: Sequence[Case], folder: Path) -> None:
    """Write the requests of each case to a file with its name, for the runners of other engines."""
    for case in own:
        lines = (
            json.dumps({"id": index, "prompt_token_ids": each.prompt_token_ids, "max_tokens": each.max_tokens, "n": 1})
            for index, each in enumerate(case.workload.requests)
        )
        (folder / f"{case.name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure_model(
    config: EngineConfig, own: Sequence[Case], options: argparse.Namespace, tell: Tell
) -> Iterator[Section]:
    """Run the cases of one model `repeat` times; each run has different token ids."""
    tell(f"loading {config.model}")
    with MeasuredEngine(config) as engine:
        engine.warm_up()
        limits = limits_of(engine.blueprint.backend.facts, options.read_size)
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        number = 1
        for case in own:
            bandwidth, rate = limits.bandwidth(), limits.arithmetic() or float("inf")
            runs = []
            for index in range(options.repeat):
                number += 1
                tell(f"{case.name}: run {index + 1} of {options.repeat}")
                runs.append(engine.run(case.workload.shifted(number, engine.vocab_size).requests))
            bound = bound_s(list(case.requests), find_shape(config.model), ceilings(bandwidth, rate))
            rows.append(_row(case, runs, bound))
            goals += _goals(case, runs, bound)
            facts = {"bandwidth": bandwidth, "rate": rate, "bound_s": bound, "min_share": case.min_share}
            samples[case.name] = {**facts, "runs": [asdict(each) for each in runs]}
        yield describe_engine(engine)
    text = (
        "nano-vllm: the 256 requests of its benchmark; 256x1k-1k: as many of 1,024 tokens and 1,024 of output; single: "
        f"one of 1,024 and {SINGLE_TOKENS}. {limits.name}. Median of {options.repeat} runs (min–max). The bound is the "
        "roofline of the same requests, scheduled likewise, with the ceilings that were measured right before. The "
        "processor was late in steps whose results it did not have to wait for: then the device may have waited for it."
    )
    header = ("what", "s", "bound, s", "% of the roofline", "output, tok/s", "processor late, %", "goal")
    yield Section(f"Whole runs: {own[0].model}", text, header, rows, samples, goals)


def _shares(runs: Sequence[Run], bound: float) -> list[float]:
    return [100 * bound / each.wall_s for each in runs]


def _late(runs: Sequence[Run]) -> list[float]:
    return [100 * each.unawaited_s / each.wall_s for each in runs]


def _row(case: Case, runs: Sequence[Run], bound: float) -> tuple[str, ...]:
    speeds = [each.num_output_tokens / each.wall_s for each in runs]
    walls, late = [each.wall_s for each in runs], _late(runs)
    columns = (cell(summarize(numbers)) for numbers in (walls, [bound], _shares(runs, bound), speeds, late))
    return case.name, *columns, f"≥ {case.min_share:.0f} %"


def _goals(case: Case, runs: Sequence[Run], bound: float) -> list[Goal]:
    share = summarize(_shares(runs, bound)).median
    goals = [Goal(f"{case.name}: % of the roofline", share, case.min_share, at_least=True)]
    if case.max_unhidden_share is not None:
        late = summarize(_late(runs)).median
        goals.append(Goal(f"{case.name}: % of the time in which the processor was late", late, case.max_unhidden_share))
    return goals
