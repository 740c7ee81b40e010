"""Cost models: a roofline counts a plan as the slow definition does, a fit finds the weights that made the times."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidConfigError, InvalidValueError
from quire.core.step import BlockCopy, BlockMove, StepPlan
from quire.simulate.cost.features import StepFeatures
from quire.simulate.cost.fitted import FittedCost, RecordedStep, read_steps
from quire.simulate.cost.linear import LinearCost
from quire.simulate.cost.roofline import RooflineCost
from quire.simulate.cost.unsteady import STRETCH, UnsteadyCost
from quire.simulate.hardware import Hardware
from quire.simulate.model_shape import ModelShape, WeightCount
from quire.simulate.roofline import Numbers, Roofline

MACHINE = Hardware("m", 1 << 34, 1e11, {"float32": 1e12, "bfloat16": 2e12}, 0.0005, 2e10)


def shape(*windows: int | None) -> ModelShape:
    count = WeightCount(matrices=10_000_000, rows=1000)
    return ModelShape("m", "bfloat16", 64, 8, 2, 32, 1000, 4096, windows, count, WeightCount(64_000, 1000))


def draw_plan(rng: random.Random) -> StepPlan:
    num_decodes, num_chunks = rng.randrange(6), rng.randrange(1, 4)
    total = num_decodes + num_chunks
    counts = [1] * num_decodes + [rng.randint(1, 300) for _ in range(num_chunks)]
    samples = [1] * num_decodes + [rng.randrange(2) for _ in range(num_chunks)]
    starts = [rng.randrange(2000) for _ in range(total)]
    columns = (array("i", values) for values in (range(total), starts, counts, samples))
    copies = tuple(BlockCopy(at, at + 50) for at in range(rng.randrange(3)))
    moves = tuple(BlockMove(at + 100, at) for at in range(rng.randrange(3)))
    return StepPlan(0, *columns, num_decodes, copies=copies, moves_out=moves)


@given(seed=st.integers(0, 1 << 32), windows=st.lists(st.sampled_from([None, None, 64, 500]), min_size=1, max_size=5))
def test_a_plan_costs_what_its_rows_do(seed: int, windows: list[int | None]) -> None:
    plan = draw_plan(random.Random(seed))
    roofline = Roofline(MACHINE, shape(*windows), Numbers())
    expected = roofline.step_s(plan.starts, plan.counts, sum(plan.samples))
    expected += len(plan.copies) * 2 * 4096 / MACHINE.read_bandwidth
    expected += len(plan.moves_out) * 4096 / MACHINE.host_link_bandwidth
    assert RooflineCost(roofline, bytes_per_block=4096).step_s(plan) == pytest.approx(expected, rel=1e-12)
    half = RooflineCost(roofline, bytes_per_block=4096, efficiency=0.5).step_s(plan)
    assert half == pytest.approx(2 * expected - MACHINE.step_overhead_s, rel=1e-12)


@given(
    seed=st.integers(0, 1 << 32),
    num_ranks=st.sampled_from([2, 4]),
    windows=st.sampled_from([[None], [None, 64]]),
    sums=st.sampled_from(["gather", "reduce"]),
)
def test_ranks_share_the_work_and_exchange_outputs_four_times_a_layer_or_sums_twice(
    seed: int, num_ranks: int, windows: list[int | None], sums: str
) -> None:
    plan, model = draw_plan(random.Random(seed)), replace(shape(*windows), intermediate_size=128)
    card = replace(MACHINE, device="cuda", link_bandwidth=1e9, exchange_s=0.001)
    numbers = Numbers(sums=sums)
    one, several = (RooflineCost(Roofline(machine, model, numbers)) for machine in (card, card.joined(num_ranks)))
    computed_s = one.step_s(plan) - card.step_overhead_s
    received = (num_ranks - 1) / num_ranks * 2  # bytes of bfloat16, of what the other ranks have computed
    exchanged = {
        "gather": (8 * 32 + 64 + 128 + 64, 4),
        "reduce": (2 * (64 + 64), 2),
    }  # numbers of a token, and latencies
    width, num_exchanges = exchanged[sums]
    layer = sum(plan.counts) * width * received / 1e9 + num_exchanges * 0.001
    logits = sum(plan.samples) * 1000 * received / 1e9 + 0.001 if sum(plan.samples) else 0.0
    copied_s = len(windows) * layer + logits
    expected = computed_s / num_ranks + copied_s + card.step_overhead_s
    assert several.step_s(plan) == pytest.approx(expected, rel=1e-9)


def test_a_processor_has_no_ranks() -> None:
    assert MACHINE.joined(1) is MACHINE
    with pytest.raises(InvalidConfigError, match=r"tensor_parallel is 2; allowed: 1 on m, which is a processor"):
        MACHINE.joined(2)


@given(
    seed=st.integers(0, 1 << 32),
    weights=st.tuples(*[st.sampled_from([0.0, 1.0, 3.0])] * 6).filter(lambda weights: weights[0] > 0),
)
def test_a_fit_finds_the_weights_that_made_the_times(seed: int, weights: tuple[float, ...]) -> None:
    rng = random.Random(seed)
    units = (1e-3, 1e-4, 1e-5, 1e-7, 1e-8, 1e-4)
    true = FittedCost(tuple(weight * unit for weight, unit in zip(weights, units, strict=True)))
    plans = [draw_plan(rng) for _ in range(60)]
    fitted = FittedCost.fit([RecordedStep(StepFeatures.of(plan), true.step_s(plan)) for plan in plans])
    for plan in [draw_plan(rng) for _ in range(20)]:
        assert fitted.step_s(plan) == pytest.approx(true.step_s(plan), rel=1e-3)


@given(seed=st.integers(0, 1 << 32))
def test_no_weight_is_negative_whatever_the_times_are(seed: int) -> None:
    rng = random.Random(seed)
    steps = [RecordedStep(StepFeatures.of(draw_plan(rng)), rng.uniform(1e-4, 1.0)) for _ in range(30)]
    assert min(FittedCost.fit(steps).weights) >= 0.0


@given(seed=st.integers(0, 1 << 32))
def test_steps_that_were_held_up_count_in_the_mean(seed: int) -> None:
    """Relative errors alone would call a step that took five times as long an error of 0.8, and the fit be too fast."""
    rng = random.Random(seed)
    features = [StepFeatures.of(draw_plan(rng)) for _ in range(200)]
    true = FittedCost((1e-3, 1e-4, 1e-5, 1e-7, 1e-8, 1e-4))
    steps = [RecordedStep(each, true.seconds_of(each) * rng.choice((1.0, 1.0, 1.0, 5.0))) for each in features]
    ratios = FittedCost.fit(steps).ratios(steps)
    assert sum(ratios) / len(ratios) == pytest.approx(1.0)


@given(seed=st.integers(0, 1 << 32), num_ratios=st.integers(1, 500))
def test_an_unsteady_machine_is_as_fast_as_it_was_recorded(seed: int, num_ratios: int) -> None:
    rng = random.Random(seed)
    ratios = array("d", (rng.uniform(0.5, 5.0) for _ in range(num_ratios)))
    cost = UnsteadyCost(LinearCost(), ratios, seed)
    plan = draw_plan(rng)
    plans = [replace(plan, step_id=step_id) for step_id in range(2 * STRETCH)]
    drawn = [cost.step_s(each) / LinearCost().step_s(each) for each in plans]
    assert drawn == [cost.step_s(each) / LinearCost().step_s(each) for each in plans], "it depends on what was asked"
    places = [min(range(num_ratios), key=lambda place: abs(ratios[place] - ratio)) for ratio in drawn]
    assert drawn == pytest.approx([ratios[place] for place in places])
    steps = [(later - earlier) % num_ratios for earlier, later in itertools.pairwise(places[:STRETCH])]
    assert set(steps) <= {1 % num_ratios}, "a stretch is not in the order of the record"


def test_recorded_steps_are_read_as_they_were_written() -> None:
    steps = [RecordedStep(StepFeatures.of(draw_plan(random.Random(seed))), 0.5 + seed) for seed in range(9)]
    assert list(read_steps([step.as_json() for step in steps], "steps")) == steps


@pytest.mark.parametrize(
    "line", ["{}", "[]", "x", '{"is_step": 1}', RecordedStep(StepFeatures(1, 1, 1, 1, 1, -1), 1.0).as_json()]
)
def test_a_line_that_is_no_step_is_named(line: str) -> None:
    good = RecordedStep(StepFeatures(1, 2, 1, 3, 3, 0), 0.1).as_json()
    with pytest.raises(InvalidValueError, match="steps, line 2"):
        list(read_steps([good, line], "steps"))


@pytest.mark.parametrize("field", [*StepFeatures._fields, "seconds"])
@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("NaN", "numbers of 0 or more, and more than 0 seconds"),
        ("Infinity", "numbers of 0 or more, and more than 0 seconds"),
        ("-1", "numbers of 0 or more, and more than 0 seconds"),
        ("1e18", "numbers of 0 or more, and more than 0 seconds"),
        ("true", "numbers"),
        ('"5"', "numbers"),
        ("null", "numbers"),
    ],
)
def test_each_number_of_a_recorded_step_must_be_one(field: str, value: str, allowed: str) -> None:
    good = dict.fromkeys([*StepFeatures._fields, "seconds"], "1")
    line = "{" + ", ".join(f'"{name}": {number}' for name, number in (good | {field: value}).items()) + "}"
    with pytest.raises(InvalidValueError) as caught:
        list(read_steps(["", line + "\n"], "steps"))
    assert (caught.value.field, caught.value.value, caught.value.allowed) == ("steps, line 2", line, allowed)


def test_a_step_may_have_done_nothing_but_not_in_no_time() -> None:
    nothing = RecordedStep(StepFeatures(0, 0, 0, 0, 0, 0), 1e-9)
    assert list(read_steps([nothing.as_json(), "  \n"], "steps")) == [nothing]
    with pytest.raises(InvalidValueError, match="more than 0 seconds"):
        list(read_steps([replace(nothing, seconds=0.0).as_json()], "steps"))


def test_too_few_steps_make_no_model() -> None:
    with pytest.raises(InvalidValueError, match="recorded steps is 1; allowed: 6 or more"):
        FittedCost.fit([RecordedStep(StepFeatures(1, 2, 1, 3, 3, 0), 0.1)])
