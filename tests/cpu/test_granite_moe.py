"""Granite-MoE: errors about its stacked experts name the tensors of the file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.weights.stacked import unstacked
from quire.core.errors import CheckpointError

DATA = Path(__file__).parents[1] / "golden" / "data" / "families"
STACK = "model.layers.1.block_sparse_moe.{}_linear.weight"


@pytest.fixture
def tensors(tmp_path: Path) -> dict[str, np.ndarray]:
    """The tensors of the golden model, as float32; its settings are in the folder."""
    form = json.loads((DATA / "cases.json").read_text())["forms"]["granite-moe"]
    (tmp_path / "config.json").write_text(json.dumps(form["config"]))
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / "model.safetensors").symlink_to(DATA / form["weights"])
    stored = Checkpoint.open(tmp_path / "stored")
    return {name: stored.tensor(name).copy() for name in stored.entries}


def refusal(folder: Path, tensors: dict[str, np.ndarray]) -> str:
    save_file(tensors, folder / "model.safetensors")
    model = ModelFolder(folder)
    with pytest.raises(CheckpointError) as refused:
        WeightReader(read_model(model).spec, model.tensors(), "float32")
    return str(refused.value)


def test_each_expert_has_its_rows_of_a_stack(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    found = unstacked(Checkpoint.open(tmp_path))
    gates, downs = tensors[STACK.format("input")][3], tensors[STACK.format("output")][3]
    stem = "model.layers.1.block_sparse_moe.experts.3."
    assert np.array_equal(found.tensor(f"{stem}gate_proj.weight"), gates[:48])
    assert np.array_equal(found.tensor(f"{stem}up_proj.weight", slice(2, 5)), gates[50:53])
    assert np.array_equal(found.tensor(f"{stem}down_proj.weight"), downs)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


@pytest.mark.parametrize("part", ["input", "output"])
def test_a_stack_that_is_missing_is_named(part: str, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    del tensors[STACK.format(part)]
    assert f"missing: {STACK.format(part)})" in refusal(tmp_path, tensors)


def test_a_stack_with_an_odd_number_of_rows_is_refused(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    name = STACK.format("input")
    tensors[name] = np.concatenate([tensors[name], tensors[name][:, :1]], axis=1)
    assert f"wrong shape: {name} [49, 32] for [48, 32]" in refusal(tmp_path, tensors)
