"""What `quire bench kernels --device cuda` measures, with little of everything: here it is checked, not timed."""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.util import find_spec

import pytest

from quire.compute.torch.attention import flashinfer
from quire.compute.torch.attention_run import AttentionRun, AttentionStep
from quire.compute.torch.limits import TorchLimits
from quire.core.errors import ExecutionError, InvariantError
from quire.instruments.bench.gpu_kernels import GpuKernelBench, Ratio, beside_flashinfer, compared
from quire.instruments.bench.gpu_predictions import Point
from support import documented_flashinfer

SMALL = AttentionStep((100, 40), 4, 2, head_dim=64, dtype="float32", kv_dtype="float32")
OPTIONS = argparse.Namespace(working_set=1 << 18, repeat=2, read_size=1 << 20)


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


def test_sections(device):
    bench = GpuKernelBench(TorchLimits(device, "float32", 1 << 20), device, OPTIONS, lambda _: None, dtype="float32")
    decodes = bench.measure_decodes([Point("two", (40, 20), 4, 2, "≥ 1 %")])
    assert [row[:2] for row in decodes.rows] == [("two", "float32")]
    sections = bench.measure_prompts((33,)), bench.measure_ratios([Ratio("same", SMALL, SMALL, 2.0)])
    assert all(section.rows and section.goals for section in sections)


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
