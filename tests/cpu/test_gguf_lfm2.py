"""GGUF files of LFM2 and LFM2-MoE compute what the folders compute that they were made from, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
from support.tiny_lfm2 import write_tiny_lfm2

FULL, SHORT = "full_attention", "conv"
SPARSE = {
    **{"architectures": ["Lfm2MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2, "num_dense_layers": 2},
    **{"moe_intermediate_size": 32, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "use_expert_bias": True},
}
ADJUSTED = {"block_auto_adjust_ff_dim": True, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 16}
FORMS: dict[str, dict[str, Any]] = {
    "small": {},
    "an adjusted MLP": {**ADJUSTED, "intermediate_size": 150},
    "attention alone": {"layer_types": [FULL] * 2, "full_attn_idxs": None, "num_hidden_layers": 2},
    "a long filter": {"conv_L_cache": 5, "num_key_value_heads": 1},
    "a head of its own": {"tie_word_embeddings": False, "tie_embedding": False},
    "experts": SPARSE,
    "experts everywhere": {**SPARSE, "num_dense_layers": 0, "layer_types": [SHORT] * 5 + [FULL] * 3},
    "experts without offsets": {**SPARSE, "use_expert_bias": False},
}


def folder_of(form: str, folder: Path) -> Path:
    """Write a tiny model with a form."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return write_tiny_lfm2(folder, norm_eps=1e-5, rope_parameters=rope, **FORMS[form])


@pytest.fixture
def small(tmp_path: Path) -> GgufHeader:
    return GgufHeader.read(write_gguf(folder_of("small", tmp_path / "model"), tmp_path / "m.gguf"))


@pytest.fixture
def sparse(tmp_path: Path) -> GgufHeader:
    return GgufHeader.read(write_gguf(folder_of("experts", tmp_path / "model"), tmp_path / "m.gguf"))


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("form", FORMS)
def test_a_file_has_the_architecture_and_the_weights_of_its_folder(form: str, backend: str, tmp_path: Path) -> None:
    folder = folder_of(form, tmp_path / "model")
    path = write_gguf(folder, tmp_path / "m.gguf")
    ours, theirs = read_model(GgufFile(path)).spec, read_model(ModelFolder(folder)).spec
    assert replace(ours, ignored_prefixes=theirs.ignored_prefixes) == theirs
    assert answer_of(path, backend) == answer_of(folder, backend)


@pytest.mark.parametrize("form", ["small", "experts"])
def test_names_are_those_of_llama_cpp(form: str, tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(folder_of(form, tmp_path / "model"), tmp_path / "m.gguf"))
    names = {name.removeprefix("blk.7.") for name in header.tensors if not name.startswith("blk.") or ".7." in name}
    mlp = ("ffn_gate", "ffn_up", "ffn_down") if form == "small" else ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
    parts = [*mlp, "attn_norm", "ffn_norm", "shortconv.conv", "shortconv.in_proj", "shortconv.out_proj"]
    more = set() if form == "small" else {"ffn_gate_inp.weight", "exp_probs_b.bias"}
    assert names == {f"{part}.weight" for part in ("token_embd", "token_embd_norm", *parts)} | more
    assert header.tensors["blk.7.shortconv.conv.weight"].shape == (64, 3)


@pytest.mark.parametrize("form", ["small", "experts"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_packed_files_take_the_memory_that_a_plan_expects(form: str, kind: str, tmp_path: Path) -> None:
    path = write_gguf(folder_of(form, tmp_path / "model"), tmp_path / "m.gguf", kind)
    spec, block_types = read_model(GgufFile(path)).spec, GgufFile(path).block_types()
    facts = plan_engine(EngineConfig(model=str(path), skip_tokenizer_init=True)).backend.facts
    assert facts.weight_bytes == weight_bytes(spec, "bfloat16", "auto", block_types, compact=facts.compact)
    in_proj = "model.layers.0.conv.in_proj.weight"
    assert block_types.get(in_proj) == (None if kind == "BF16" else kind)
    assert len(answer_of(path)[0]) == len(answer_of(path, weights="widened")[0]) == NUM_TOKENS


def test_files_of_ollama_have_another_norm_and_mlp_and_images(tmp_path: Path) -> None:
    """They name the last norm otherwise, and have the size of the MLP before its adjustment."""
    folder = folder_of("an adjusted MLP", tmp_path / "model")
    header = GgufHeader.read(write_gguf(folder, tmp_path / "m.gguf"))
    tensors = {name.replace("token_embd_norm", "output_norm"): each for name, each in header.tensors.items()}
    tensors |= {"v.patch_embd.weight": header.tensors["token_embd.weight"], "mm.1.bias": tensors["output_norm.weight"]}
    theirs = replace(header, tensors=tensors, settings={**header.settings, "lfm2.feed_forward_length": 150})
    spec = spec_of(theirs, tmp_path / "spec")
    assert spec == read_model(ModelFolder(folder)).spec
    assert spec.mlp.intermediate_size == 144
    WeightReader(spec, GgufTensors(theirs), "float32")
    assert GgufTensors(theirs).stored_name("model.embedding_norm.weight") == "output_norm.weight"
    assert GgufTensors(header).stored_name("model.embedding_norm.weight") == "token_embd_norm.weight"


def test_the_weights_of_experts_are_as_the_file_says(sparse: GgufHeader, tmp_path: Path) -> None:
    for name, settings, expected in (
        ("as always", {}, (True, 1.0)),
        ("scaled", {"lfm2moe.expert_weights_scale": 2.5, "lfm2moe.expert_weights_norm": False}, (False, 2.5)),
    ):
        experts = spec_of(replace(sparse, settings={**sparse.settings, **settings}), tmp_path / name).experts
        assert experts is not None
        assert (experts.normalize_weights, experts.scale) == expected


REFUSED: dict[str, tuple[str, Any, str]] = {  # the setting, its value, and what the error says
    "window": ("lfm2.attention.sliding_window", 16, r"sliding_window is 16; allowed: none: no LFM2 with a window"),
    "later tokens": ("lfm2.attention.causal", False, r"attention\.causal is False; allowed: true: no token attends to"),
    "causal": ("lfm2.attention.causal", 1, r"attention\.causal is 1; allowed: true or false"),
    "too few layers": (
        "lfm2.attention.head_count_kv",
        [0, 2],
        r"head_count_kv is \[0, 2\]; allowed: .* of the 8 layers",
    ),
    "no attention": ("lfm2.attention.head_count_kv", [0] * 8, r"head_count_kv is \[\]; allowed: an integer from 1"),
    "unlike heads": (
        "lfm2.attention.head_count_kv",
        [0] * 6 + [1, 2],
        r"head_count_kv is \[1, 2\]; allowed: an integer",
    ),
    "heads of text": ("lfm2.attention.head_count_kv", [0] * 7 + ["2"], r"head_count_kv is '2'; allowed: an integer"),
    "filter": ("lfm2.shortconv.l_cache", None, r"l_cache is None; allowed: an integer from 1"),
    "epsilon": ("lfm2.attention.layer_norm_rms_epsilon", 0.0, r"rms_epsilon is 0\.0; allowed: a number above 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused_by_their_names(name: str, small: GgufHeader) -> None:
    key, value, message = REFUSED[name]
    header = replace(small, settings={**small.settings, key: value})
    with pytest.raises(CheckpointError, match=message):
        config_of(header, GgufTensors(header).setting)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("expert_gating_func", 1, r"expert_gating_func is 1; allowed: 2, a sigmoid"),
        ("expert_used_count", None, r"expert_used_count is None; allowed: an integer from 1"),
        ("leading_dense_block_count", -1, r"leading_dense_block_count is -1; allowed: an integer from 0"),
        ("expert_weights_norm", 1, r"expert_weights_norm is 1; allowed: true or false"),
    ],
)
def test_experts_that_do_not_fit_are_refused(key: str, value: object, message: str, sparse: GgufHeader) -> None:
    header = replace(sparse, settings={**sparse.settings, f"lfm2moe.{key}": value})
    with pytest.raises(CheckpointError, match=message):
        config_of(header, GgufTensors(header).setting)


def test_a_layer_with_tensors_of_the_other_kind_is_refused(small: GgufHeader, tmp_path: Path) -> None:
    heads = [0, 0, 0, 2, 0, 0, 2, 2]
    header = replace(small, settings={**small.settings, "lfm2.attention.head_count_kv": heads})
    with pytest.raises(CheckpointError, match=r"missing: blk\.7\.attn_.*extra: blk\.7\.shortconv\."):
        WeightReader(spec_of(header, tmp_path / "spec"), GgufTensors(header), "float32")
    dense = {**small.tensors, "dense_2.weight": small.tensors["token_embd.weight"]}
    with pytest.raises(CheckpointError, match=r"extra: dense_2\.weight"):
        WeightReader(spec_of(small, tmp_path / "other"), GgufTensors(replace(small, tensors=dense)), "float32")
    flat = replace(small.tensors["blk.0.ffn_gate.weight"], shape=(6144,))
    header = replace(small, tensors={**small.tensors, "blk.0.ffn_gate.weight": flat})
    with pytest.raises(CheckpointError, match=r"wrong shape: blk\.0\.ffn_gate\.weight"):
        WeightReader(spec_of(header, tmp_path / "flat"), GgufTensors(header), "float32")
