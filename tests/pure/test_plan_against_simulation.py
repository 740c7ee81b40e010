"""What a plan says by arithmetic comes true when the product's scheduler and memory serve those requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.model_shapes import find_shape
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec
from quire.instruments.bench.shapes import CONFIGS
from quire.simulate.capacity import Concurrency, Occupancy
from quire.simulate.cost.roofline import RooflineCost
from quire.simulate.estimate import Estimate, Estimator
from quire.simulate.hardware import find_hardware
from quire.simulate.lengths import RequestLengths
from quire.simulate.model_shape import ModelShape
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.result import SimulationResult
from quire.simulate.roofline import Numbers, Roofline
from quire.simulate.simulation import Simulation
from quire.simulate.workload.closed_loop import ClosedLoop
from quire.simulate.workload.drawn import DrawnPrompts
from quire.simulate.workload.lengths import UniformLengths

QWEN3 = find_shape("qwen3-0.6b")
DRAWN = UniformLengths((100, 500), (50, 250))
PAIRS = RequestLengths.of_pairs(
    [(prompt, output) for prompt in range(100, 501, 8) for output in range(50, 251, 8)], 2048
)


def spec_of(shape: ModelShape) -> KVCacheSpec:
    """The spec of a model whose blocks have the usual size, or hold a state."""
    size = shape.kv_cache_spec(16, "bfloat16").usual_block_size
    return shape.kv_cache_spec(size, "bfloat16")


def both(
    machine: str, num_users: int, budget: int, *, num_blocks: int, seconds: float, shape: ModelShape = QWEN3
) -> tuple[Estimate, SimulationResult]:
    """What is planned for so many users who always ask again, and what they find."""
    roofline = Roofline(find_hardware(machine), shape, Numbers())
    setup = EngineSetup(
        spec_of(shape),
        MemoryConfig(num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs=num_users, max_num_batched_tokens=budget, max_model_len=2048),
        RooflineCost(roofline),
    )
    source = ClosedLoop(num_users, DrawnPrompts(DRAWN), duration_s=seconds, seed=0)
    return Estimator(roofline, PAIRS).serving(num_users, budget), Simulation([PagedEngine(setup)], source).run()


@pytest.mark.parametrize(
    ("machine", "num_users", "budget", "seconds"),
    [("zen5-2-cores", 16, 512, 300.0), ("nvidia-l4", 64, 1024, 10.0), ("nvidia-h100", 96, 2048, 2.0)],
)
def test_a_busy_server_is_as_fast_as_planned(machine: str, num_users: int, budget: int, seconds: float) -> None:
    planned, found = both(machine, num_users, budget, num_blocks=20_000, seconds=seconds)
    assert found.num_preemptions == 0
    assert found.output_tokens_per_s == pytest.approx(planned.tokens_per_s, rel=0.1)
    assert found.latencies["tpot_s"].mean == pytest.approx(planned.tpot_s, rel=0.1)


def test_a_pool_holds_as_many_as_planned() -> None:
    planned = require_so_many(QWEN3, num_blocks=700, seconds=6.0)
    assert planned.longest < planned.p95


def test_a_pool_with_states_holds_as_many_as_planned(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3.5-0.8b"]))
    require_so_many(find_shape(str(tmp_path / "config.json")), num_blocks=160, seconds=12.0)


def require_so_many(shape: ModelShape, *, num_blocks: int, seconds: float) -> Concurrency:
    planned = Occupancy.of(spec_of(shape), PAIRS).in_pool(num_blocks, 2048)
    _, found = both("nvidia-l4", 64, 1024, num_blocks=num_blocks, seconds=seconds, shape=shape)
    assert planned.p95 < found.mean_running
    assert found.mean_running == pytest.approx(planned.average, rel=0.1)
    assert 1 - planned.waste == pytest.approx(found.replicas[0].stored_share_of_used, rel=0.03)
    return planned
