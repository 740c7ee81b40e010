"""Figures of benchmarks: shares of a bound, several products as one, bytes and operations of a model, and quality."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.instruments.bench import decode
from quire.instruments.bench.decode import AIM_STEP_US, MAX_STEP_US, MIN_RATIO, DecodeOptions
from quire.instruments.bench.gpu_predictions import HEAD_DIM, Point
from quire.instruments.bench.growth import _rows
from quire.instruments.bench.kernels import ProductRun, together
from quire.instruments.bench.latency import DecodeRun, PrefillRun
from quire.instruments.bench.model_costs import ModelCosts
from quire.instruments.bench.quality import Quality, divergences, log_probabilities
from quire.simulate.model_shape import ModelShape, WeightCount

POSITIVE = st.floats(1e-3, 1e3)
RUNS = st.builds(ProductRun, POSITIVE, st.integers(1, 999), st.integers(1, 999), POSITIVE, POSITIVE)
SHAPE = ModelShape("m", "float32", 8, 2, 1, 4, 10, 64, (None, 3), WeightCount(600, 60), WeightCount(80, 10))


# ---- kernels -------------------------------------------------------------------------------------------------------


def test_shares_are_percents_of_the_bandwidth_and_of_the_arithmetic() -> None:
    run = ProductRun(seconds=2.0, num_bytes=30, num_operations=80, bandwidth=100.0, arithmetic=50.0)
    assert (run.read_share, run.arithmetic_share, run.bound_share) == (15.0, 80.0, 80.0)
    slow = ProductRun(2.0, 180, 80, 100.0, None)
    assert (slow.read_share, slow.arithmetic_share, slow.bound_share) == (90.0, None, 90.0)


@given(st.lists(st.tuples(st.integers(1, 5), RUNS), min_size=1, max_size=5))
def test_several_products_as_one_take_their_times_and_have_their_bounds(runs: list[tuple[int, ProductRun]]) -> None:
    found = together(runs)
    repeated = [run for count, run in runs for _ in range(count)]
    assert found.seconds == pytest.approx(sum(run.seconds for run in repeated))
    assert (found.num_bytes, found.num_operations) == (
        sum(run.num_bytes for run in repeated),
        sum(run.num_operations for run in repeated),
    )
    read_s = sum(run.num_bytes / run.bandwidth for run in repeated)
    computed_s = sum(run.num_operations / run.arithmetic for run in repeated if run.arithmetic)
    assert found.read_share == pytest.approx(100 * read_s / found.seconds)
    assert found.arithmetic_share == pytest.approx(100 * computed_s / found.seconds)


def test_products_of_an_unknown_arithmetic_have_no_share_of_it() -> None:
    assert together([(2, ProductRun(1.0, 5, 5, 5.0, None))]).arithmetic is None


# ---- latency -------------------------------------------------------------------------------------------------------


def test_the_shares_of_a_step_are_of_its_median_and_of_the_time_of_all() -> None:
    run = DecodeRun([1.0, 2.0, 5.0], 0.5, 6.0, 10.0, num_operations=30.0, bandwidth=4.0, arithmetic=60.0, bound_s=0.5)
    assert (run.outside_share, run.bound_share, run.arithmetic_share) == (25.0, 25.0, 25.0)
    bare = DecodeRun([1.0], 0.5, 1.0, 10.0, num_operations=0.0, bandwidth=4.0, arithmetic=60.0, bound_s=None)
    assert (bare.outside_share, bare.bound_share, bare.arithmetic_share) == (0.0, 0.0, None)
    assert PrefillRun(2.0, 30, 60.0).arithmetic_share == 25.0
    assert [PrefillRun(2.0, *known).arithmetic_share for known in ((None, 60.0), (30, None))] == [None, None]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 9))
def test_the_costs_of_a_model_are_those_of_a_walk_through_its_tokens(lengths: list[int], num_tokens: int) -> None:
    costs = ModelCosts(SHAPE, step_bytes=1, kv_bytes_per_layer_token=7)

    def seen(position: int, window: int | None) -> int:
        """How many tokens one at a position attends to, itself counted."""
        return len(range(0 if window is None else max(0, position - window + 1), position + 1))

    read = sum(seen(length - 1, window) for length in lengths for window in SHAPE.windows)
    assert costs.kv_bytes(lengths) == 7 * read
    operations = len(lengths) * (SHAPE.operations_per_token + SHAPE.operations_per_logits)
    assert costs.decode_operations(lengths) == operations + read * SHAPE.operations_per_pair
    pairs = sum(seen(position, window) for position in range(num_tokens) for window in SHAPE.windows)
    operations = num_tokens * SHAPE.operations_per_token + SHAPE.operations_per_logits
    assert costs.prompt_operations(num_tokens) == operations + pairs * SHAPE.operations_per_pair


@pytest.mark.parametrize(("number_bytes", "token_bytes"), [(2.0, 4 * HEAD_DIM), (1.0, 2 * (HEAD_DIM + 4))])
def test_decode_attention_reads_each_key_and_value_once(number_bytes: float, token_bytes: float) -> None:
    point = Point("p", (3, 5), num_heads=8, num_kv_heads=2, goal="", number_bytes=number_bytes)
    assert point.token_bytes == token_bytes
    queries_and_outputs = 2 * 2 * 8 * HEAD_DIM * 2  # of bfloat16, whatever keys are
    assert point.num_bytes == (3 + 5) * 2 * token_bytes + queries_and_outputs


# ---- the control plane and the peer --------------------------------------------------------------------------------

OPTIONS = DecodeOptions(*range(1, 1 + len(DecodeOptions.__dataclass_fields__)))


def test_growth_is_told_by_ratios_within_each_run() -> None:
    rows = list(_rows({10: [1.0, 2.0, 4.0], 1000: [2.0, 3.0, 4.0]}, "size {:,}"))
    assert rows == [
        ("size 10", "2.00 (1.00–4.00)", "1.00× (1.00–1.00)"),
        ("size 1,000", "3.00 (2.00–4.00)", "1.50× (1.00–2.00)"),
    ]


def test_the_peer_is_compared_run_by_run_and_only_where_it_ran() -> None:
    runs = [
        {"ours_lockstep": {"step_s": [1e-6, 3e-6, 2e-6]}, "peer_lockstep": {"step_s": [8e-6]}},
        {"ours_lockstep": {"step_s": [4e-6]}},
    ]
    found = decode._collect(runs, OPTIONS, decode._of_steps("lockstep", decode._median))
    assert (found.ours, found.peer) == (pytest.approx([2.0, 4.0]), pytest.approx([8.0]))
    assert decode._beside(decode._Runs([2.0, 4.0], [8.0, 8.0])) == ("8.00 (8.00–8.00)", "3.00× (2.00–4.00)")
    assert decode._beside(decode._Runs([2.0])) == ("–", "–")


def test_a_number_that_the_peers_script_prints_is_taken_as_it_is() -> None:
    measure = decode._of_steps("lockstep", decode._median, "its_key")
    run = {"ours_lockstep": {"step_s": [5e-6]}, "peer_script": {"its_key": "7.5"}}
    assert measure(run, OPTIONS, "ours") == pytest.approx(5.0)
    assert measure(run, OPTIONS, "peer") == 7.5
    assert measure({}, OPTIONS, "peer") is None


def test_times_of_prompts_are_nanoseconds_of_a_token() -> None:
    options = DecodeOptions(**dict.fromkeys(DecodeOptions.__dataclass_fields__, 1) | {"running": 4, "prompt": 10})
    run = {"ours_lockstep": {"a": 1e-6, "b": 3e-6}, "ours_staggered": {"a": 1e-6, "b": 3e-6}}
    assert decode._of_prompts("lockstep", ("a", "b"))(run, options, "ours") == pytest.approx(4000 / 40)
    assert decode._of_prompts("staggered", ("b",))(run, options, "ours") == pytest.approx(3000 / (10 + 11 + 12 + 13))


def test_goals_are_the_bound_and_the_aim_of_each_step_and_the_ratio_to_the_peer() -> None:
    table = {
        name: decode._Runs([2.0, 3.0, 9.0], [30.0, 30.0, 90.0] if name == decode.LOCKSTEP_MEAN else [])
        for name in (decode.LOCKSTEP_MEDIAN, decode.LOCKSTEP_MEAN, decode.STAGGERED_MEDIAN, decode.STAGGERED_MEAN)
    }
    goals = decode._decode_goals(table)
    assert [(goal.measured, goal.bound, goal.at_least) for goal in goals] == [
        *[(3.0, MAX_STEP_US, False), (3.0, AIM_STEP_US, False)] * 4,
        (10.0, MIN_RATIO, True),
    ]


# ---- quality -------------------------------------------------------------------------------------------------------

LOGITS = st.lists(st.lists(st.floats(-30, 30), min_size=3, max_size=3), min_size=2, max_size=4)


@given(LOGITS, st.floats(-1e4, 1e4))
def test_log_probabilities_are_those_of_a_softmax_wherever_the_logits_lie(rows: list[list[float]], by: float) -> None:
    found = log_probabilities(np.array(rows) + by)
    for row, logs in zip(rows, found.tolist(), strict=True):
        weights = [math.exp(logit - max(row)) for logit in row]
        for log, weight in zip(logs, weights, strict=True):
            assert log == pytest.approx(math.log(weight / math.fsum(weights)), abs=1e-6)


@given(LOGITS, LOGITS)
def test_a_divergence_is_0_or_more_and_that_of_equals_is_0(first: list[list[float]], second: list[list[float]]) -> None:
    size = min(len(first), len(second))
    one, other = log_probabilities(np.array(first[:size])), log_probabilities(np.array(second[:size]))
    found = divergences(one, other)
    for index in range(size):
        pairs = zip(one[index].tolist(), other[index].tolist(), strict=True)
        assert found[index] == pytest.approx(math.fsum(math.exp(p) * (p - q) for p, q in pairs), abs=1e-9)
    assert (found > -1e-9).all()
    assert divergences(one, one).tolist() == [0.0] * size


def probabilities(*rows: Sequence[float]) -> np.ndarray:
    return np.log(np.array(rows))


def test_quality_is_of_the_tokens_that_came_behind_each_token() -> None:
    reference = probabilities((0.5, 0.25, 0.25), (0.25, 0.5, 0.25), (0.25, 0.25, 0.5))
    expected = probabilities((0.5, 0.25, 0.25), (0.5, 0.25, 0.25), (0.125, 0.125, 0.75))
    quality = Quality()
    quality.note([2, 0, 1], expected, reference)
    assert quality.surprises == pytest.approx([math.log(2), math.log(4)]), "of token 0, then of token 1"
    assert quality.agreements == [True, False, True]
    assert quality.divergences == pytest.approx(
        [0.0, 0.25 * math.log(2), 0.5 * math.log(2) + 0.5 * math.log(2 / 3)], abs=1e-12
    )
    assert quality.perplexity == pytest.approx(math.sqrt(8))
    assert quality.row()[0::3] == ("2.8284", "66.67 %")
    mean = 1e3 * sum(quality.divergences) / 3
    assert float(quality.row()[1].replace(",", "")) == pytest.approx(mean, rel=0.01)
