"""What `quire bench kernels --device cuda` measures, with little of everything: here it is checked, not timed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from quire.compute.torch.attention import flashinfer
from quire.compute.torch.attention_run import AttentionRun, AttentionStep
from quire.compute.torch.kernels.tile_shape import FORMS
from quire.compute.torch.limits import TorchLimits
from quire.core.errors import ExecutionError, InvariantError
from quire.instruments.bench.gpu_attention import GpuKernelBench, Ratio
from quire.instruments.bench.gpu_kernels import beside_flashinfer, compared
from quire.instruments.bench.gpu_predictions import Point
from quire.instruments.bench.gpu_products import measure_products
from quire.instruments.bench.gpu_tiles import PLACE, measure_tiles
from support import documented_flashinfer

SMALL = AttentionStep((100, 40), 4, 2, head_dim=64, dtype="float16", kv_dtype="float16")


@pytest.mark.parametrize(
    "step",
    (
        SMALL,
        replace(SMALL, contiguous=True),
        *(replace(SMALL, kv_dtype=kv_dtype) for kv_dtype in ("int8", "k8v4", "int4")),
        replace(SMALL, contexts=(70,), num_queries=70),
        replace(SMALL, contexts=(530,) * 4, shared_tokens=512, batch_invariant=True),
    ),
    ids=repr,
)
def test_steps_are_checked(step, device):
    AttentionRun(step, device, 1).check()


def test_a_wrong_result_is_found(device):
    run = AttentionRun(SMALL, device, 1)
    run._tables[:, 0] = run._tables[:, 1]  # what is compared with is read from other blocks
    with pytest.raises(InvariantError, match="attention is off by"):
        run.check()


@pytest.fixture
def bench(device):
    sizes = {"working_set": 1 << 10, "repeat": 1, "rows": (1, 2), "small": True, "device": device}
    return GpuKernelBench(TorchLimits(device, "float32", 1 << 20), argparse.Namespace(**sizes), lambda _: None, [])


POINTS = [Point(name, (40, 20), 4, 2, "≥ 1 %") for name in ("one", "two")]


def test_sections_grow_with_every_point(bench):
    grown = [[row[:2] for row in section.rows] for section in bench.measure_decodes(POINTS)]
    assert grown == [[("one", "bfloat16")], [("one", "bfloat16"), ("two", "bfloat16")]]
    *_, prompts = bench.measure_prompts((33,))
    *_, compared = bench.measure_ratios("Side by side", [Ratio("same", SMALL, SMALL, 2.0)])
    *_, products = measure_products(bench)
    assert prompts.goals and compared.goals and len(products.rows) == 10
    assert all(len(row) == len(each.header) for each in (prompts, compared, products) for row in each.rows)


def test_a_point_that_fails_loses_only_itself(bench, monkeypatch):
    monkeypatch.setattr(GpuKernelBench, "timed", lambda *_: 1 / 0)
    *_, found = bench.measure_decodes(POINTS)
    monkeypatch.undo()
    *_, right = bench.measure_decodes(POINTS)
    reason = "ZeroDivisionError: division by zero"
    assert [row[2] for row in found.rows] == [reason] * 2 and reason not in str(right.rows)
    assert bench._failures == ["decodes: one, bfloat16", "decodes: two, bfloat16"]


def test_the_best_tile_is_named_with_the_place_to_set_it(bench, monkeypatch):
    assert len(next(measure_tiles(bench)).rows) == 2 and not bench._failures
    times = iter([[[3.0], [2.0]], [[1.0], [2.0]]])
    monkeypatch.setattr(GpuKernelBench, "timed", lambda *_: next(times, [[2.0], [2.0]]))
    first = next(measure_tiles(bench))
    assert first.text.startswith("**Best of 2: rows 16, tokens 64, warps 4, stages 4, split 256: 0.93 of the time.**")
    assert f"Set it in {PLACE}: FORMS, the entry (True, 128, False). " in first.text
    assert FORMS[True, 128, False] == (16, 64, 4, 3) and (Path(__file__).parents[2] / PLACE).exists()


def test_every_step_that_is_compared_can_be_made():
    ratios = (*compared(), *beside_flashinfer())
    assert all(ratio.above != ratio.below and ratio.above.num_bytes > 0 for ratio in ratios)


@pytest.mark.parametrize("step", (SMALL, replace(SMALL, contexts=(70,), num_queries=70)), ids=repr)
def test_flashinfer_computes_the_same_steps(step, monkeypatch):
    """As its documentation describes it; on a GPU that has it, the command checks each step before it is timed."""
    monkeypatch.setattr(flashinfer, "load_package", lambda: documented_flashinfer)
    AttentionRun(replace(step, backend="flashinfer"), "cpu", 1).check()


@pytest.mark.skipif(find_spec("flashinfer") is not None, reason="FlashInfer is installed")
def test_without_flashinfer_its_steps_are_refused():
    with pytest.raises(ExecutionError, match="needs flashinfer-python"):
        AttentionRun(replace(SMALL, backend="flashinfer"), "cpu", 1)
