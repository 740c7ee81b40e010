"""What is simulated is what would be decided: a real model's plans and a simulated model's are the same bytes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from quire.compute.models.source import ModelFolder
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan
from quire.engine.factory import create_reference_engine
from quire.engine.records.step_log import PLANNED, read_records, replayed
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.simulation import Simulation
from quire.simulate.workload.offered import OpenLoop
from quire.simulate.workload.step_log import logged_requests
from support.tiny_checkpoint import write_tiny_qwen3

SYSTEM = [(7 * i) % 120 for i in range(40)]
PROMPTS = [SYSTEM + [i, 2 * i, 3 * i + 1] * (1 + i % 4) for i in range(10)] + [[5], SYSTEM[:32], SYSTEM[:32]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("model"))


def plans_in(log: io.BytesIO) -> list[StepPlan]:
    records = read_records(io.BytesIO(log.getvalue()))
    return [StepPlan.from_bytes(payload) for kind, _, payload in records if kind == PLANNED]


def decisions(plan: StepPlan) -> tuple[object, ...]:
    """Everything that a plan says, but for what the model has said: the tokens that a row resumes with."""
    starts = [(start.row, start.request_id, start.branch, len(start.tokens)) for start in plan.row_starts]
    columns = plan.rows, plan.starts, plan.counts, plan.samples, plan.released_rows
    return (plan.step_id, *columns, plan.tables, plan.moves_out, plan.copies, plan.moves_in, starts)


SETTINGS: list[dict[str, int | str]] = [
    {},
    {"max_num_batched_tokens": 24},
    {"max_steps_under_way": 2},
    {"preemption": "swap"},
    {"policy": "fair_share"},
]


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        *((settings, 24) for settings in SETTINGS),
        (SETTINGS[0], 400),
        *(pytest.param(settings, 400, marks=pytest.mark.long) for settings in SETTINGS[1:]),
    ],
    ids=str,
)
def test_an_offline_batch_is_planned_by_the_simulator_as_by_the_engine(
    folder: Path, settings: dict[str, int | str], num_blocks: int
) -> None:
    memory = MemoryConfig(num_blocks=num_blocks, num_host_blocks=20, prefix_index="hash_chain")
    scheduler = SchedulerConfig(**{"max_num_seqs": 8, "max_model_len": 256, "headroom": 0.0} | settings)  # type: ignore[arg-type]
    real = io.BytesIO()
    engine = create_reference_engine(ModelFolder(folder), block_size=8, memory=memory, scheduler=scheduler, log=real)
    for number, prompt in enumerate(PROMPTS):
        sampling = SamplingParams(temperature=0.0, max_tokens=20 + 2 * number, ignore_eos=True)
        engine.add_request(Request(f"r{number}", prompt, sampling))
    engine.run()
    engine.close()

    requests = list(logged_requests(replayed(io.BytesIO(real.getvalue()))))
    assert [len(request.prompt) for request in requests] == list(map(len, PROMPTS))
    simulated = io.BytesIO()
    setup = EngineSetup(engine.scheduler.memory.spec, memory, scheduler)
    again = PagedEngine(setup, log=simulated)
    for request in requests:
        again.core.add_request(request.request())
    again.core.run()
    ours, theirs = plans_in(simulated), plans_in(real)
    assert list(map(decisions, ours)) == list(map(decisions, theirs))
    if num_blocks == 24:
        assert again.num_preemptions == engine.scheduler.num_preemptions > 0
    timed = Simulation([PagedEngine(setup)], OpenLoop(requests)).run()
    assert timed.output_tokens == sum(20 + 2 * number for number in range(len(PROMPTS)))
