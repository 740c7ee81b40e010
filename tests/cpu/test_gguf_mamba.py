"""GGUF files of Granite 4 H and Nemotron-H compute what the folders compute that they were made from, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.settings import config_of
from quire.compute.gguf.source import GgufFile
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import WeightReader, weight_bytes
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError
from quire.engine.factory import plan_engine
from support.gguf_answers import NUM_TOKENS, answer_of, spec_of
from support.gguf_models import write_gguf
from support.tiny_granite import NEMOTRON, write_tiny_granite, write_tiny_nemotron

FACTORS = {
    **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22, "attention_multiplier": 0.25},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32, "shared_intermediate_size": 64}
FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "groups, no bias": {"mamba_n_groups": 2, "mamba_conv_bias": False, "mamba_d_conv": 3, "tie_word_embeddings": True},
    "nemotron": NEMOTRON,
    "nemotron with experts": {
        **NEMOTRON,
        **{"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "intermediate_size": 32},
    },
    "mamba alone": {"layer_types": ["mamba"] * 7 + ["attention"], "num_key_value_heads": 4, "mamba_expand": 4},
}


def folder_of(form: str, folder: Path) -> Path:
    """Write a tiny model with a form, whose decays survive exp and log."""
    (write_tiny_nemotron if form.startswith("nemotron") else write_tiny_granite)(folder, **{**FACTORS, **FORMS[form]})
    tensors = load_file(folder / "model.safetensors")
    every = np.linspace(-3, 2, 500, dtype=np.float32)
    same = every[np.log(np.exp(every)) == every]
    for name in (name for name in tensors if ".A_log" in name):
        tensors[name] = np.random.default_rng(0).choice(same, tensors[name].shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def dense(tmp_path: Path) -> GgufHeader:
    return GgufHeader.read(write_gguf(folder_of("dense", tmp_path / "model"), tmp_path / "m.gguf"))


@pytest.mark.parametrize("form", FORMS)
def test_a_file_has_the_architecture_and_the_weights_of_its_folder(form: str, tmp_path: Path) -> None:
    folder = folder_of(form, tmp_path / "model")
    path = write_gguf(folder, tmp_path / "m.gguf")
    ours, theirs = read_model(GgufFile(path)).spec, read_model(ModelFolder(folder)).spec
    assert replace(ours, sources=theirs.sources, ignored_tensors=theirs.ignored_tensors) == theirs
    assert answer_of(path, "native") == answer_of(folder, "native")


def test_names_of_nemotron_are_those_of_llama_cpp(tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(folder_of("nemotron with experts", tmp_path / "m"), tmp_path / "m.gguf"))
    assert header.settings["general.architecture"] == "nemotron_h_moe"
    of_layers = [
        {name.removeprefix(f"blk.{layer}.") for name in header.tensors if f".{layer}." in name} for layer in (1, 2)
    ]
    parts = ("attn_norm", "ffn_gate_inp", "ffn_up_exps", "ffn_down_exps", "ffn_up_shexp", "ffn_down_shexp")
    assert of_layers[0] == {f"{part}.weight" for part in parts} | {"exp_probs_b.bias"}
    assert of_layers[1] == {f"attn_{part}.weight" for part in ("norm", "q", "k", "v", "output")}
    tensors = GgufTensors(header)
    stored = [tensors.stored_name(ours) for ours in tensors.entries]
    assert set(stored) == set(header.tensors)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("feed_forward_length", 96, r"is 96; allowed: a list with a number for each of the 4 layers"),
        ("attention.head_count_kv", [2], r"is \[2\]; allowed: a list with a number for each of the 4 layers"),
        ("nextn_predict_layers", 1, r"is 1; allowed: 0: no layers that predict further tokens are run"),
        ("expert_group_count", 2, r"is 2; allowed: an integer from 1 to 1"),
        ("expert_weights_norm", 1, r"is 1; allowed: true or false"),
    ],
)
def test_settings_of_nemotron_that_do_not_fit_are_refused(
    key: str, value: object, message: str, tmp_path: Path
) -> None:
    header = GgufHeader.read(write_gguf(folder_of("nemotron with experts", tmp_path / "m"), tmp_path / "m.gguf"))
    header = replace(header, settings={**header.settings, f"nemotron_h_moe.{key}": value})
    with pytest.raises(CheckpointError, match=message):
        config_of(header, GgufTensors(header).setting)


@pytest.mark.parametrize("form", ["dense", "experts"])
def test_names_are_those_of_llama_cpp(form: str, tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(folder_of(form, tmp_path / "model"), tmp_path / "m.gguf"))
    assert header.settings["general.architecture"] == "granitehybrid"
    names = {name.removeprefix("blk.0.") for name in header.tensors if name.startswith("blk.0.")}
    kinds = ("",) if form == "dense" else ("_exps", "_shexp")
    parts = [f"ffn_{part}{kind}" for part in ("gate", "up", "down") for kind in kinds]
    parts += ["attn_norm", "ffn_norm", "ssm_in", "ssm_conv1d", "ssm_norm", "ssm_out"]
    more = {"ssm_conv1d.bias", "ssm_dt.bias", "ssm_a", "ssm_d"} | (
        {"ffn_gate_inp.weight"} if form != "dense" else set()
    )
    assert names == {f"{part}.weight" for part in parts} | more
    shapes = {"ssm_a": (8, 1), "ssm_d": (8, 1), "ssm_norm.weight": (1, 128), "ssm_conv1d.weight": (160, 4)}
    assert {name: header.tensors[f"blk.0.{name}"].shape for name in shapes} == shapes
    tensors = GgufTensors(header)
    for name in header.tensors:
        ours = next(ours for ours, entry in tensors.entries.items() if entry.tensor.start == header.tensors[name].start)
        assert tensors.stored_name(ours) == name


@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_packed_files_take_the_memory_that_a_plan_expects(kind: str, tmp_path: Path) -> None:
    path = write_gguf(folder_of("experts", tmp_path / "model"), tmp_path / "m.gguf", kind)
    spec, block_types = read_model(GgufFile(path)).spec, GgufFile(path).block_types()
    facts = plan_engine(EngineConfig(model=str(path), skip_tokenizer_init=True)).backend.facts
    assert facts.weight_bytes == weight_bytes(spec, "bfloat16", "auto", block_types, compact=facts.compact)
    assert block_types.get("model.layers.0.mamba.in_proj.weight") == (None if kind == "BF16" else kind)
    assert len(answer_of(path)[0]) == len(answer_of(path, weights="widened")[0]) == NUM_TOKENS


REFUSED: dict[str, tuple[str, Any, str]] = {  # the setting, its value, and what the error says
    "positions": ("rope.scaling.finetuned", True, r"finetuned is True; allowed: false: of Bamba, only folders are run"),
    "too few layers": ("attention.head_count_kv", [0, 2], r"is \[0, 2\]; allowed: .* of the 8 layers, 0 for mamba"),
    "no attention": (
        "attention.head_count_kv",
        [0] * 8,
        r"head_count_kv is \[\]; allowed: heads whose rows make up the 32",
    ),
    "odd heads": ("ssm.time_step_rank", 7, r"inner_size is 128; allowed: a multiple of ssm\.time_step_rank, 7"),
    "inner size": ("ssm.inner_size", 96, r"inner_size is 96; allowed: a multiple of embedding_length, 64"),
    "groups": ("ssm.group_count", None, r"group_count is None; allowed: an integer from 1"),
    "filter": ("ssm.conv_kernel", 0, r"conv_kernel is 0; allowed: an integer from 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused_by_their_names(name: str, dense: GgufHeader) -> None:
    key, value, message = REFUSED[name]
    header = replace(dense, settings={**dense.settings, f"granitehybrid.{key}": value})
    with pytest.raises(CheckpointError, match=message):
        config_of(header, GgufTensors(header).setting)


def test_tensors_that_do_not_fit_are_refused_by_their_names(dense: GgufHeader, tmp_path: Path) -> None:
    for name, tensors, message in (
        ("more", {"blk.3.ssm_a": dense.tensors["blk.0.ssm_a"]}, r"extra: blk\.3\.ssm_a"),
        ("flat", {"blk.0.ssm_d": replace(dense.tensors["blk.0.ssm_d"], shape=(2, 2))}, r"wrong shape: blk\.0\.ssm_d"),
    ):
        header = replace(dense, tensors={**dense.tensors, **tensors})
        with pytest.raises(CheckpointError, match=message):
            WeightReader(spec_of(header, tmp_path / name), GgufTensors(header), "float32")
