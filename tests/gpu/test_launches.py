"""What is launched: accepted by Triton's launcher, and nothing compiled while requests are served."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.gpu import host_time
from tests.gpu.counting_driver import run_alone

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from support.adapters import adapter_tensors, write_adapter
from support.guess_layers import GLM, write_guessing_model
from support.spec_models import write_model_of
from support.tiny_checkpoint import tiny_qwen3_config, write_tiny_qwen3
from support.tiny_gemma4 import FAR, NEAR, write_tiny_gemma4

KINDS: dict[str, dict[str, object]] = {
    "windows": {"use_sliding_window": True, "sliding_window": 1200, "max_window_layers": 1},
    "experts": {  # all layers attend to everything
        "architectures": ["Qwen3MoeForCausalLM"],
        "max_window_layers": 0,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 48,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
}
EXPERTS = {"route_kernel": 1, "group_kernel": 2, "product_kernel": 4, "combine_kernel": 1}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, and all other tests launch on it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launchers with a C compiler")
@pytest.mark.parametrize(
    ("kind", "kv_dtype"),
    [
        ("experts", "auto"),
        ("windows", "int4"),
        *(pytest.param(kind, "auto", marks=pytest.mark.long) for kind in KINDS if kind != "experts"),
    ],
)
def test_all_that_is_served_was_compiled_when_the_largest_steps_were_rehearsed(
    kind: str, kv_dtype: str, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    write_model_of(model, tiny_qwen3_config() | KINDS[kind])
    rehearsed, served = run_alone("tests.gpu.counting_driver", str(model), kv_dtype)
    assert served == rehearsed
    if kind == "experts":
        # Up and down, of few rows and of many; up has two pairs of a row, down one.
        assert {name: served.get(name) for name in EXPERTS} == EXPERTS
    kernels = {"attend_kernel", "merge_kernel", "rotate_and_write_kernel", "norm_kernel", "activation_kernel"}
    kernels |= {"turn_kernel", "write_int4_kernel", "product_kernel"} if kv_dtype == "int4" else set()
    kernels |= {"highest_kernel", "weigh_kernel", "choose_kernel", "penalize_kernel"}
    assert served.keys() >= kernels and served["merge_kernel"] == 4  # of 2, 4, 8 and 16 parts at a time
    assert served["weigh_kernel"] == 2  # logits as the head computes them, and in float32 after rules


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, and all other tests launch on it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launchers with a C compiler")
def test_windows_whose_heads_have_a_size_of_their_own_launch_what_was_rehearsed(tmp_path: Path) -> None:
    """A window reaches into more splits after the end of one than at it, and no other layer merges as many parts."""
    layers = {"layer_types": [NEAR, FAR], "num_hidden_layers": 2, "num_kv_shared_layers": 0, "sliding_window": 1024}
    model = write_tiny_gemma4(tmp_path / "model", **layers, dtype="bfloat16")
    rehearsed, served = run_alone("tests.gpu.counting_driver", str(model), "auto")
    assert served == rehearsed


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, and all other tests launch on it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launchers with a C compiler")
@pytest.mark.parametrize("sums", ["gather", pytest.param("reduce", marks=pytest.mark.long)])
def test_ranks_launch_what_they_rehearsed(sums: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model_of(model, tiny_qwen3_config() | KINDS["experts"])
    rehearsed, served, replayed = run_alone("tests.gpu.counting_ranks", str(model), sums)
    assert served == rehearsed
    assert {name: served.get(name) for name in EXPERTS} == EXPERTS
    assert replayed > 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, and all other tests launch on it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launchers with a C compiler")
def test_what_launching_costs_is_measured_for_every_case() -> None:
    found = host_time.section(repeat=2)
    assert [row[0] for row in found.rows] == list(host_time.CASES)
    assert all(len(seconds) == 2 for _, _, *both in found.samples["steps"] for seconds in both)  # type: ignore[attr-defined]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, and all other tests launch on it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launchers with a C compiler")
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_a_recorded_step_launches_as_much_with_adapters_as_without(kind: str, tmp_path: Path) -> None:
    """Those were loaded after the recording. Kernel by kernel, their number does not matter either."""
    model = tmp_path / "model"
    model.mkdir()
    if kind == "dense":
        write_tiny_qwen3(model)
    else:
        write_model_of(model, tiny_qwen3_config() | KINDS["experts"])
    spec = read_model(ModelFolder(model)).spec
    for seed in range(8):
        write_adapter(model / f"a{seed}", adapter_tensors(spec, seed=seed))
    found, num_compiled = run_alone("tests.gpu.adapter_launches", str(model))
    assert num_compiled == 0, "while requests are served"
    assert found["launched, one adapter"] == found["launched, all adapters"]
    assert sum(found["launched, one adapter"]) > 2 * sum(found["launched, no adapter"])
    assert found["recorded, one adapter"] == found["recorded, all adapters"]
    kernels, operations = found["recorded, no adapter"]
    # Work of attention, tables, columns, rows before the head and settings of draws go in; tokens and flags come out.
    assert (kernels, operations) == (0, 7)
    assert found["recorded, one adapter"][0] == kernels
    # Upload of the slots of rows, and their copy to where the recording reads them.
    assert operations < found["recorded, one adapter"][1] <= operations + 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver, and all other tests launch on it")
@pytest.mark.skipif(shutil.which("cc") is None, reason="Triton builds its launchers with a C compiler")
def test_a_layer_that_guesses_launches_what_it_rehearsed_and_the_host_never_waits_for_it(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_guessing_model(model, GLM)
    rehearsed, served, launched = run_alone("tests.gpu.layer_launches", str(model))
    assert served == rehearsed
    assert launched["1"] == launched["8"], "for one row as for many"
    kernels, operations, num_waits = launched["1"]
    assert num_waits == 0
    assert 10 < kernels + operations < 80
