"""`quire bench gpu-engine`: whole runs on a GPU, compared with the roofline of the same requests.

    requests ──► the engine itself            seconds from adding all requests to the last token
            └──► the simulator, same scheduler, steps at the device's measured ceilings: the bound

The ceilings are measured in the same run. The runs are those that `quire bench gpu-predictions` predicts. Work of the
CPU while the device computes costs nothing. If the device has to wait for the CPU, the results of a step are ready
before the engine asks for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from quire.cli.engine_options import add_engine_options, engine_config
from quire.cli.machine_limits import limits_of
from quire.cli.model_shapes import find_settings, find_shape
from quire.compute.models.config_file import CONFIG_FILE
from quire.compute.models.hub import GUIDE
from quire.compute.torch.device import choose_device, look
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.instruments.bench.flags import add_choices, add_count, add_size
from quire.instruments.bench.gpu_predictions import SINGLE_TOKENS, WholeRun, bound_s, ceilings, whole_runs
from quire.instruments.bench.measured_engine import MeasuredEngine, Run
from quire.instruments.bench.shapes import write_random_weights
from quire.instruments.bench.throughput import describe_engine
from quire.instruments.bench.workload_file import Workload, WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, reason_of, run_benchmark
from quire.reporting.samples import summarize
from quire.simulate.workload.offered import OfferedRequest

MAX_UNHIDDEN_SHARE: Final = {"nano-vllm": 5.0}
TEMPERATURES: Final = {"nano-vllm": 0.6}


def workload(run: WholeRun) -> Workload:
    """Return the requests of a run as a workload for an engine."""
    temperature = TEMPERATURES.get(run.name)
    requests = (
        WorkloadRequest(tuple(each.prompt), each.num_output_tokens, temperature=temperature) for each in run.requests
    )
    return Workload(run.name, tuple(requests))


def few_requests() -> WholeRun:
    """Return a small run, to try this command."""
    prompts = (array("i", range(number, 40)) for number in range(3))
    requests = tuple(OfferedRequest(str(number), 0.0, prompt, 8) for number, prompt in enumerate(prompts))
    return WholeRun("few", "a few short requests", GUIDE, requests, 0.0, None)


GPU_MODELS = ("qwen3-0.6b", "llama-3.1-8b")
DESCRIPTION = (
    "Run the nano-vllm benchmark, 256 prompts of 1,024 tokens, and single streams, with random weights, and "
    "compare each with the roofline of the same requests, from device limits measured right before. Needs "
    "--device cuda."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    models = "measure only these models; guide: a few short requests on any device, to try this command"
    add_choices(parser, "only", (*GPU_MODELS, GUIDE), GPU_MODELS, models)
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
    wanted = [case for case in (*whole_runs(), few_requests()) if case.model in options.only]
    failures: list[str] = []

    def measure(tell: Tell) -> Iterator[Section]:
        for model in dict.fromkeys(case.model for case in wanted):
            with checkpoint(model, options.folder, tell) as folder:
                own = [case for case in wanted if case.model == model]
                if options.folder:
                    write_workloads(own, Path(options.folder))
                yield from measure_model(replace(config, model=str(folder)), own, options, tell, failures)

    return run_benchmark(options, "GPU engine", measure) or int(bool(failures))


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


def write_workloads(own: Sequence[WholeRun], folder: Path) -> None:
    """Write the requests of each case to a file with its name, for the runners of other engines."""
    for case in own:
        lines = (
            json.dumps({"id": index, "prompt_token_ids": each.prompt_token_ids, "max_tokens": each.max_tokens, "n": 1})
            for index, each in enumerate(workload(case).requests)
        )
        (folder / f"{case.name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def measure_model(
    config: EngineConfig, own: Sequence[WholeRun], options: argparse.Namespace, tell: Tell, failures: list[str]
) -> Iterator[Section]:
    """Run the cases of one model `repeat` times, each with different token ids. Adds failed cases to `failures`."""
    tell(f"loading {config.model}")
    with MeasuredEngine(config) as engine:
        engine.warm_up()
        yield describe_engine(engine)
        limits = limits_of(engine.blueprint.backend.facts, options.read_size)
        text = (
            "nano-vllm: the 256 requests of its benchmark; 256x1k-1k: as many of 1,024 tokens and 1,024 of output; "
            f"single: one of 1,024 and {SINGLE_TOKENS}. {limits.name}. Median of {options.repeat} runs (min–max). The "
            "bound is the roofline of the same requests, with the same scheduler and the ceilings measured right "
            "before; predictions are shares of the roofline, too. The processor was late in steps whose results it did "
            "not have to wait for: the device may have waited for it."
        )
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        for number, case in enumerate(own):
            try:
                bandwidth, rate = limits.bandwidth(), limits.arithmetic() or float("inf")
                runs = _runs(engine, case, number * options.repeat, options, tell)
                bound = bound_s(list(case.requests), find_shape(config.model), ceilings(bandwidth, rate))
            except Exception as error:  # a failure affects only this case
                failures.append(case.name)
                tell(f"failed: {reason_of(error)}")
                rows.append((case.name, reason_of(error), *("–",) * (len(HEADER) - 2)))
            else:
                rows.append(_row(case, runs, bound))
                goals += _goals(case, runs, bound)
                facts = {"bandwidth": bandwidth, "rate": rate, "bound_s": bound, "min_share": case.min_share}
                samples[case.name] = {**facts, "runs": [asdict(each) for each in runs]}
            yield Section(f"Whole runs: {case.model}", text, HEADER, rows, samples, goals)


HEADER: Final = (
    "what",
    "s",
    "bound, s",
    "% of the roofline",
    "predicted",
    "output, tok/s",
    "processor late, %",
    "goal",
)


def _runs(engine: MeasuredEngine, case: WholeRun, first: int, options: argparse.Namespace, tell: Tell) -> list[Run]:
    runs = []
    for index in range(options.repeat):
        tell(f"{case.name}: run {index + 1} of {options.repeat}")
        shifted = workload(case).shifted(first + index + 2, engine.vocab_size)
        runs.append(engine.run(shifted.requests))
    return runs


def _shares(runs: Sequence[Run], bound: float) -> list[float]:
    return [100 * bound / each.wall_s for each in runs]


def _late(runs: Sequence[Run]) -> list[float]:
    return [100 * each.unawaited_s / each.wall_s for each in runs]


def _row(case: WholeRun, runs: Sequence[Run], bound: float) -> tuple[str, ...]:
    speeds = [each.num_output_tokens / each.wall_s for each in runs]
    walls, late = [each.wall_s for each in runs], _late(runs)
    before = (cell(summarize(numbers)) for numbers in (walls, [bound], _shares(runs, bound)))
    predicted = "–" if case.predicted_share is None else f"{case.predicted_share} %"
    after = (cell(summarize(numbers)) for numbers in (speeds, late))
    return case.name, *before, predicted, *after, f"≥ {case.min_share:.0f} %"


def _goals(case: WholeRun, runs: Sequence[Run], bound: float) -> list[Goal]:
    share = summarize(_shares(runs, bound)).median
    goals = [Goal(f"{case.name}: % of the roofline", share, case.min_share, at_least=True)]
    if case.name in MAX_UNHIDDEN_SHARE:
        late, most = summarize(_late(runs)).median, MAX_UNHIDDEN_SHARE[case.name]
        goals.append(Goal(f"{case.name}: % of the time in which the processor was late", late, most))
    return goals
