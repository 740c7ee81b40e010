"""The timeline: means over it are means over the time of steps, however long a step took and whatever was merged."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import astuple

import pytest

from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.simulate.cost.linear import LinearCost
from quire.simulate.paper.runs import Outcome
from quire.simulate.replica import EngineSetup, PagedEngine, SimulatedEngine
from quire.simulate.simulation import Simulation
from quire.simulate.timeline import MAX_POINTS, Timeline, TimelinePoint, mean_over_time
from quire.simulate.workload.offered import OfferedRequest, OpenLoop

SPEC = KVCacheSpec(4, 1, 8, "float32", (KVGroup((0,)),))


@pytest.mark.parametrize("num_steps", [1, 2, 900, 40_000, 120_000])
def test_a_point_counts_for_the_time_of_its_steps_however_often_it_was_merged(num_steps: int) -> None:
    rng, timeline, looks, now_s, busy_s = random.Random(num_steps), Timeline(), [], 0.0, 0.0

    def look(at_s: float, stands_s: float) -> TimelinePoint:
        looks.append((stands_s, rng.uniform(0.0, 100.0)))
        return TimelinePoint(at_s, stands_s, *[looks[-1][1]] * 12)

    for _ in range(num_steps):
        step_s = rng.choice([0.001, 0.02, 3.0]) * rng.random()
        now_s += step_s + (50.0 if rng.random() < 0.01 else 0.0)  # now and then there was nothing to do
        busy_s += step_s
        before = len(looks)
        timeline.advance(now_s, step_s, look)
        if len(looks) > before:
            assert sum(stands_s for stands_s, _ in looks) == pytest.approx(busy_s)
    assert len(timeline.points) < MAX_POINTS
    assert (len(looks) >= MAX_POINTS) == (num_steps >= 40_000)
    expected = sum(stands_s * value for stands_s, value in looks) / sum(stands_s for stands_s, _ in looks)
    assert mean_over_time(timeline.points, lambda point: point.used_blocks) == pytest.approx(expected)
    times = [point.time_s for point in timeline.points]
    assert times == sorted(set(times))


def test_points_of_no_time_have_no_mean_and_can_be_merged() -> None:
    timeline = Timeline()
    for step in range(64 * MAX_POINTS):
        timeline.advance(float(step), 0.0, lambda at_s, stands_s: TimelinePoint(at_s, stands_s, *[2.0] * 12))
    assert timeline.interval_s == 2.0
    assert {astuple(point)[2:] for point in timeline.points} == {(2.0,) * 12}
    assert mean_over_time(timeline.points, lambda point: point.running) == 0.0


def test_a_share_of_the_memory_is_that_of_the_time_and_not_of_the_points() -> None:
    """One prompt takes a step of 102 seconds, the texts after it seconds; and between them there is nothing to do."""
    prompts = [array("i", range(start, start + size)) for start, size in ((0, 200), (500, 7), (600, 9))]
    requests = [OfferedRequest(str(index), 400.0 * index, prompt, 6) for index, prompt in enumerate(prompts)]
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=400, max_model_len=300)
    setup = EngineSetup(SPEC, MemoryConfig(num_blocks=100, prefix_index="none"), scheduler, LinearCost(2.0, 0.5))
    engine = PagedEngine(setup)
    ends: dict[float, tuple[float, int, int]] = {}  # after each step: its length, blocks and slots in use

    def watch(_: int, watched: SimulatedEngine) -> None:
        ledger, step_s = watched.ledger(), 2.0 + 0.5 * watched.plan.num_tokens
        ends[watched.clock.now()] = step_s, ledger.used_blocks, ledger.stored_slots

    result = Simulation([engine], OpenLoop(requests), watchers=[watch]).run()
    (replica,) = result.replicas
    looked, busy_s, blocks, slots = {point.time_s for point in replica.timeline}, 0.0, 0.0, 0.0
    since_s = 0.0
    for at_s, (step_s, used, stored) in ends.items():
        since_s += step_s
        if at_s in looked:
            busy_s, blocks, slots, since_s = busy_s + since_s, blocks + since_s * used, slots + since_s * stored, 0.0
    assert replica.mean_share("used_blocks") == pytest.approx(blocks / busy_s / 100)
    assert replica.mean_share("stored_slots") == pytest.approx(slots / busy_s / 400)
    assert replica.stored_share_of_used == pytest.approx(slots / (4 * blocks))
    assert replica.mean_share("used_blocks") > 0.3  # the mean of the points is below
    assert Outcome.of(result).filled == pytest.approx(slots / (4 * blocks))


def looked(now_s: float, busy_s: float) -> TimelinePoint:
    return TimelinePoint(now_s, busy_s, *[1.0] * 12)


def test_a_point_is_taken_at_each_interval_and_at_the_first_step_behind_a_pause() -> None:
    timeline, step_s = Timeline(), 1 / 128
    for place in range(0, 160):
        timeline.advance(place * step_s, step_s, looked)
    for place in range(80):
        timeline.advance(2.75 + place * step_s, step_s, looked)
    assert [point.time_s for point in timeline.points] == [0.0, 1.0, 2.75, 3.0]
    assert [point.busy_s for point in timeline.points] == [step_s, 1.0, 32 * step_s, 32 * step_s]


def test_between_two_points_lie_as_many_steps_as_there_are_points_up_to_64() -> None:
    timeline, numbers = Timeline(first_interval_s=0.5), []
    for number in range(2600):  # each step is longer than an interval
        before = len(timeline.points)
        timeline.advance(float(number), 1.0, looked)
        if len(timeline.points) > before:
            numbers.append(number)
    gaps = [after - before for before, after in itertools.pairwise(numbers)]
    assert gaps == [min(place, 64) for place in range(1, len(gaps) + 1)]
