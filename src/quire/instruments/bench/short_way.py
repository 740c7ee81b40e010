"""The cost of a step of decodes in Python, by the short way and the long way, in turn.

The model computes nothing, so the time is Python's: scheduling, the arrays of the step, the draws, the commit. A worker
takes the long way if its plans count no decodes.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np

from quire.compute.backend import WorkerParts
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.compute.worker.worker import Worker
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan
from quire.engine.core import EngineCore
from quire.engine.factory import plan_engine
from quire.reporting.report import Goal, Section, cell
from quire.reporting.samples import ratios, summarize

ROWS = (1, 32, 256)
MAX_CALLS = 60
PROMPT_TOKENS, NUM_WARM_UP, NUM_TIMED = 20, 4, 160  # multiples of a block, because steps that fill a block cost more
SHORT, LONG = "short", "long"


class InstantRunner:
    """A model runner that computes nothing: all logits are 0."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._logits = np.zeros((max(ROWS), -(-vocab_size // 16) * 16), np.float32)

    def run(self, inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
        """Return the logits of a step."""
        num_tokens, num_logits = len(inputs.token_ids), len(inputs.logit_indices)
        finite = np.ones(num_tokens, np.bool_)
        return StepOutputs(self._logits[:num_logits], finite, np.ones(num_logits, np.bool_))


class LongWayWorker(Worker):
    """A worker that takes every plan as one without decodes."""

    def submit(self, plan: StepPlan) -> None:
        """Compute a plan, the long way."""
        super().submit(replace(plan, num_decodes=0))


def measure_short_way(repeat: int, tell: Callable[[str], None]) -> Section:
    """Measure steps of 1, 32 and 256 decodes, both ways in turn, and count the calls of each."""
    step_us: dict[tuple[int, str], list[float]] = {(rows, way): [] for rows in ROWS for way in (SHORT, LONG)}
    calls: dict[tuple[int, str], int] = {}
    for number in range(repeat):
        tell(f"short way: run {number + 1} of {repeat}")
        for (rows, way), values in step_us.items():
            with closing(_engine(rows, way)) as engine:
                calls[rows, way] = min(_num_calls(engine) for _ in range(3))
                values.append(_step_us(engine))
    table = [
        (
            f"{rows}",
            f"{calls[rows, SHORT]}",
            f"{calls[rows, LONG]}",
            cell(summarize(step_us[rows, SHORT])),
            cell(summarize(step_us[rows, LONG])),
            cell(summarize(ratios(step_us[rows, LONG], step_us[rows, SHORT])), "×"),
        )
        for rows in ROWS
    ]
    text = (
        "Steps in which every row decodes. The model computes nothing, so this is the time of Python. Calls: Python "
        "function calls from the start of a step to the model, the fewest of three steps. Times: whole steps, mean of "
        f"{NUM_TIMED}. The long way is the general path, without the shortcut for decodes. Median of {repeat} runs "
        "(min–max), in turn."
    )
    header = ("rows", "calls", "calls, long way", "µs", "µs, long way", "long to short")
    samples = {f"{rows} rows, {way}": values for (rows, way), values in step_us.items()}
    goals = [Goal("Python calls from a step of one row to the model", calls[1, SHORT], MAX_CALLS)]
    return Section("Steps of decodes", text, header, table, {"step_us": samples}, goals)


def _engine(rows: int, way: str) -> EngineCore:
    """Return an engine in which this many rows decode."""

    def make_worker(parts: WorkerParts) -> Worker:
        kind = Worker if way == SHORT else LongWayWorker
        return kind(parts.with_runner(InstantRunner(parts.runner.vocab_size)))

    config = EngineConfig(model="guide", kv_memory="64MiB", num_threads=1, max_num_seqs=rows, skip_tokenizer_init=True)
    config = replace(config, max_num_batched_tokens=max(512, 2 * rows))
    engine = plan_engine(config).build(SystemClock(), make_executor=make_worker)
    sampling = SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True)
    for index in range(rows):
        engine.add_request(Request(f"r{index}", [5 + index] * PROMPT_TOKENS, sampling))
    while any(request.num_output_tokens < NUM_WARM_UP for request in engine.scheduler.requests.values()):
        engine.step()
    return engine


def _step_us(engine: EngineCore) -> float:
    gc.collect()
    started = time.perf_counter()
    for _ in range(NUM_TIMED):
        engine.step()
    return 1e6 * (time.perf_counter() - started) / NUM_TIMED


def _num_calls(engine: EngineCore) -> int:
    """Return the number of Python function calls in a step before the model runs."""
    count, is_counting = 0, True

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count, is_counting
        is_counting &= frame.f_code is not InstantRunner.run.__code__
        count += event == "call" and is_counting

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return count
