"""GGUF files of Gemma 3n: those of llama.cpp and of Ollama have the model of the folder that they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.settings import config_of
from quire.compute.gguf.source import GgufFile
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import WeightReader, expected_tensors
from quire.core.errors import CheckpointError
from support.gguf_answers import answer_of, spec_of
from support.gguf_models import write_gguf
from support.tiny_gemma3n import write_tiny_gemma3n

STACK = "altup_unembd_proj.weight"
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
NAMED = {"altup_num_inputs": 4, "altup_active_idx": 0, "rope_parameters": ROPES}
"""Settings that have a default in folders, and that a converter writes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma3n(tmp_path_factory.mktemp("gemma3n"), **NAMED)


@pytest.fixture(scope="module")
def header(folder: Path) -> GgufHeader:
    return GgufHeader.read(write_gguf(folder, folder / "m.gguf"))


def changed(header: GgufHeader, **settings: Any) -> GgufHeader:
    """Return a header with other settings of the architecture; those that are None are left out."""
    names = {f"gemma3n.{name.replace('__', '.')}": each for name, each in settings.items()}
    found = {name: each for name, each in {**header.settings, **names}.items() if each is not None}
    return replace(header, settings=found)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_blocks_of_every_matrix_stay_packed(backend: str, folder: Path, tmp_path: Path) -> None:
    path, made = write_gguf(folder, tmp_path / "m.gguf", "Q8_0"), gguf.GGMLQuantizationType.Q8_0
    tensors, plain = GgufFile(path).tensors(), load_file(folder / "model.safetensors")
    names = {f"model.altup{kind}_projections.{number}.weight" for kind in ("", "_unembed") for number in range(3)}
    assert names | {"model.layers.5.laurel.linear_left.weight"} <= tensors.block_types.keys()
    for name in names:
        assert np.array_equal(tensors.block_rows(name), gguf.quants.quantize(plain[name], made)), name
    assert {tensors.stored_name(name) for name in names} == {"altup_proj.weight", STACK}
    widened = write_tiny_gemma3n(tmp_path / "widened", **NAMED)
    save_file({name: tensors.tensor(name).copy() for name in tensors.entries}, widened / "model.safetensors")
    assert answer_of(path, backend, weights="widened") == answer_of(widened, backend)
    assert answer_of(path, backend)[0]


def test_files_of_ollama_name_some_settings_in_other_ways(header: GgufHeader, folder: Path, tmp_path: Path) -> None:
    names = {"attention__key_length": None, "attention__value_length": None, "attention__shared_kv_layers": 3}
    own = {"head_dim": 32, "rope__freq_base_local": 10_000.0, "altup__correct_scale": True, "altup__lr_multiplier": 1.0}
    of_ollama = changed(header, **names, **own)
    sound = {**header.tensors, "a.blk.0.ln1.weight": header.tensors["output_norm.weight"]}
    spec = spec_of(replace(of_ollama, tensors=sound), tmp_path / "ollama")
    assert spec == read_model(ModelFolder(folder)).spec
    WeightReader(spec, GgufTensors(replace(of_ollama, tensors=sound)), "float32")
    without = spec_of(changed(header, altup__correct_scale=False), tmp_path / "plain")
    scale = "model.layers.5.altup.correct_output_scale.weight"
    assert scale in expected_tensors(spec) and scale in without.ignored_tensors
    near = spec_of(changed(header, rope__freq_base_local=500.0), tmp_path / "near").layers
    assert [layer.rope != other.rope for layer, other in zip(near, spec.layers, strict=True)] == [
        layer.window is not None for layer in spec.layers
    ]


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no layers of others": ("attention__shared_kv_layers", None, r"is None; allowed: an integer from 0 to 5"),
    "half a layer": ("attention__shared_kv_layers", 2.5, r"shared_kv_layers is 2\.5; allowed: an integer from 0 to 5"),
    "too few windows": (
        "attention__sliding_window_pattern",
        [True],
        r"allowed: a list of booleans, one for each of the 6",
    ),
    "too few thresholds": (
        "activation_sparsity_scale",
        [1.0],
        r"scale is \[1\.0\]; allowed: a number for each of the 6",
    ),
    "an endless threshold": ("activation_sparsity_scale", [float("inf")] * 6, r"allowed: a number from 0 to below 1"),
    "no number": ("activation_sparsity_scale", [float("nan")] * 6, r"allowed: a number from 0 to below 1"),
    "two streams": ("altup__num_inputs", 2, r"altup_num_inputs is 2; allowed: 4, as in the published"),
    "another stream": ("altup__active_idx", 1, r"altup_active_idx is 1; allowed: 0, as in the published"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused_by_their_names(name: str, header: GgufHeader, tmp_path: Path) -> None:
    key, value, said = REFUSED[name]
    with pytest.raises(CheckpointError, match=said):
        spec_of(changed(header, **{key: value}), tmp_path / "spec")


def test_a_stack_that_lacks_a_matrix_is_named(header: GgufHeader, tmp_path: Path) -> None:
    spec, stack = spec_of(header, tmp_path / "spec"), header.tensors[STACK]
    assert stack.shape == (3, 64, 64)
    short = replace(header, tensors={**header.tensors, STACK: replace(stack, shape=(2, 64, 64))})
    with pytest.raises(CheckpointError, match=r"tensors \(missing: altup_unembd_proj\.weight\)"):
        WeightReader(spec, GgufTensors(short), "float32")
    flat = replace(header, tensors={**header.tensors, STACK: replace(stack, shape=(192, 64))})
    with pytest.raises(CheckpointError, match=r"missing: altup_unembd_proj\.weight; extra: altup_unembd_proj"):
        WeightReader(spec, GgufTensors(flat), "float32")


def test_without_thresholds_the_first_layers_have_the_usual_ones(header: GgufHeader) -> None:
    found = config_of(changed(header, activation_sparsity_scale=None), GgufTensors(header).setting)
    assert "activation_sparsity_pattern" not in found
