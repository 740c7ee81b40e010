"""What is launched: accepted by Triton's launcher, and nothing compiled while requests are served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.gpu.counting_driver import run_alone

from support.tiny_checkpoint import write_tiny_qwen3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, and all other tests launch on it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launchers with a C compiler")
@pytest.mark.parametrize("windows", [False, True], ids=["full", "windows"])
def test_all_that_is_served_was_compiled_when_the_largest_steps_were_rehearsed(windows: bool, tmp_path: Path) -> None:
    settings = {"use_sliding_window": True, "sliding_window": 1200, "max_window_layers": 1} if windows else {}
    model, scratch = tmp_path / "model", tmp_path / "driver"
    scratch.mkdir()
    model.mkdir()
    write_tiny_qwen3(model, settings=settings)
    rehearsed, served = run_alone(model, scratch)
    assert served == rehearsed
    kernels = {"attend_kernel", "merge_kernel", "rotate_and_write_kernel", "norm_kernel", "activation_kernel"}
    kernels |= {"highest_kernel", "weigh_kernel", "choose_kernel"}
    assert served.keys() >= kernels and served["merge_kernel"] == 4  # of 2, 4, 8 and 16 parts at a time
