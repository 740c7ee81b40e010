"""The short way for decodes: the same arrays and the same results as the long way, and little Python on the way."""

from __future__ import annotations

import dataclasses
import sys
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest

from quire.compute.backend import WorkerParts
from quire.compute.worker.worker import Worker
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan, StepResult
from quire.engine.core import EngineCore
from quire.engine.factory import plan_engine
from support.tiny_checkpoint import write_tiny_qwen3

MOST_CALLS = 60
CAREFUL = (
    {"logprobs": 2},
    {"repetition_penalty": 1.3},
    {"logit_bias": {7: 4.0}},
    {"prompt_logprobs": 1},
    {"beam_search": True, "temperature": 0.0, "best_of": 2},
)


class ComparedWorker(Worker):
    """A worker that builds each plan of decodes both ways, or takes the long way only."""

    def __init__(self, parts: WorkerParts, *, takes_short_way: bool = True) -> None:
        super().__init__(parts)
        self.takes_short_way = takes_short_way
        self.num_short = self.num_long = 0
        self.results: list[bytes] = []

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan if self.takes_short_way else dataclasses.replace(plan, num_decodes=0))

    def collect(self) -> StepResult:
        result = super().collect()
        self.results.append(result.to_bytes())
        return result

    def _compute(self, plan: StepPlan, batch: Any) -> StepResult:
        short = self._decodes.build(plan, batch)
        self.num_short += short is not None
        self.num_long += short is None
        if short is not None:
            long = batch.build(plan)
            for field in dataclasses.fields(long):
                expected, found = getattr(long, field.name), getattr(short, field.name)
                if isinstance(expected, np.ndarray):
                    assert found.dtype == expected.dtype and np.array_equal(found, expected), field.name
                elif field.name in ("slots", "block_tables"):
                    assert all(map(np.array_equal, found, expected)), field.name
                else:
                    assert found == expected, field.name
        return super()._compute(plan, batch)


def engine(make_executor: Any = ComparedWorker, **settings: Any) -> EngineCore:
    wanted = {"model": "guide", "kv_memory": "4MiB", "num_threads": 1, "skip_tokenizer_init": True, **settings}
    config = EngineConfig(**wanted)
    return plan_engine(config).build(SystemClock(), make_executor=make_executor)


def ask(core: EngineCore, count: int, **sampling: Any) -> None:
    for index in range(count):
        wanted = {"temperature": 1.0, "seed": index, "max_tokens": 20 + 3 * index, "ignore_eos": True, **sampling}
        core.add_request(Request(f"r{index}", [5 + index] * (3 + 11 * index), SamplingParams(**wanted)))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> str:
    near = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    return str(write_tiny_qwen3(tmp_path_factory.mktemp("windows"), settings=near))


FEW_BLOCKS = {"kv_memory": "512KiB", "max_num_batched_tokens": 24}


@pytest.mark.parametrize(
    ("has_windows", "backend", "settings"),
    [
        *((False, "native", {}), (False, "reference", FEW_BLOCKS)),
        *((True, "native", FEW_BLOCKS), (True, "reference", {})),
    ],
)
def test_both_ways_are_the_same(has_windows: bool, backend: str, settings: dict[str, Any], windows: str) -> None:
    results = []
    for takes_short_way in (True, False):
        make = partial(ComparedWorker, takes_short_way=takes_short_way)
        core = engine(make, backend=backend, model=windows if has_windows else "guide", **settings)
        ask(core, 6)
        texts = sorted((request.request_id, request.output_token_ids) for request in core.run())
        worker = core._executor
        assert isinstance(worker, ComparedWorker) and (worker.num_short > 10) == takes_short_way
        results.append((texts, worker.results))
        core.close()
    assert results[0] == results[1]


@pytest.mark.parametrize("sampling", CAREFUL, ids=str)
def test_what_needs_a_closer_look_takes_the_long_way(sampling: dict[str, Any]) -> None:
    core = engine()
    ask(core, 1, **sampling)
    core.run()
    worker = core._executor
    assert isinstance(worker, ComparedWorker)
    assert worker.num_short == 0 and worker.num_long > 10
    core.close()


def test_a_row_that_has_failed_takes_the_long_way() -> None:
    core = engine()
    ask(core, 2)
    for _ in range(4):
        core.step()
    worker = core._executor
    assert isinstance(worker, ComparedWorker) and worker._batch is not None
    before = worker.num_long
    worker._batch.fail(0, "broken")
    outcome = core.step()
    assert outcome is not None and [each.error for each in outcome.finished] == ["broken"]
    assert worker.num_long == before + 1
    core.close()


def num_calls(core: EngineCore) -> int:
    """Return how many Python functions a step calls before the compiled decoder."""
    count, is_counting = 0, True

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count, is_counting
        count += event == "call" and is_counting
        is_counting &= frame.f_code.co_qualname != "CacheEngine.places"

    sys.setprofile(note)
    try:
        core.step()
    finally:
        sys.setprofile(None)
    return count


def test_a_decode_is_a_few_calls_away_from_the_compiled_decoder() -> None:
    found = {}
    for rows in (1, 32):
        core = engine(Worker, max_num_seqs=32)
        for index in range(rows):
            sampling = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
            core.add_request(Request(f"r{index}", [5 + index] * 20, sampling))
        for _ in range(4):
            core.step()
        found[rows] = min(num_calls(core) for _ in range(5))  # a step that fills a block has more to do
        core.close()
    assert found[1] <= MOST_CALLS
    assert found[32] <= found[1] + 3
