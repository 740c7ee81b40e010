"""GGUF files of Gemma 4 compute what the folders compute that they were made from, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire.compute.adapters.folder import read_adapter
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.settings import config_of
from quire.compute.gguf.source import GgufFile
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.models import read_model
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.native.load import kernels_for
from quire.compute.weights.decoder_weights import WeightReader, weight_bytes
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError
from quire.engine.factory import plan_engine
from support.gguf_answers import answer_of, spec_of
from support.gguf_models import write_gguf
from support.random_blocks import blocks_of
from support.tiny_gemma4 import FAR, NEAR, write_tiny_gemma4

ROPES = {
    NEAR: {"rope_type": "default", "rope_theta": 10_000.0},
    FAR: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32},
    **{"hidden_size_per_layer_input": 0, "use_double_wide_mlp": False, "num_kv_shared_layers": 0},
}
KEYS = {"attention_k_eq_v": True, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the settings, and heads of full attention other than 64
    "small": ({}, {}),
    "without inputs of layers": ({"hidden_size_per_layer_input": 0, "final_logit_softcapping": None}, {}),
    "narrow MLPs": ({"use_double_wide_mlp": False}, {}),
    "a head of its own": ({"tie_word_embeddings": False, "num_kv_shared_layers": 0}, {}),
    "keys that are values": (KEYS, {"num_key_value_heads": 1}),
    "other heads with values": ({"num_kv_shared_layers": 0}, {"num_key_value_heads": 4}),
    "heads of one size": ({}, {"head_dim": 32}),
    "most dimensions rotate": ({"rope_parameters": {**ROPES, FAR: {**ROPES[FAR], "partial_rotary_factor": 0.75}}}, {}),
    "experts": (EXPERTS, {"num_key_value_heads": 1}),
}


def folder_of(form: str, folder: Path) -> Path:
    """Write a tiny model with a form, whose heads are named as transformers names them."""
    changes, wide = FORMS[form]
    kinds = [NEAR, NEAR, NEAR, FAR, NEAR, FAR, NEAR, FAR]
    single = {str(layer): {"head_dim": 64, **wide} for layer, kind in enumerate(kinds) if kind == FAR}
    return write_tiny_gemma4(
        folder, **{"rms_norm_eps": 1e-6, "rope_parameters": ROPES} | changes, per_layer_config=single
    )


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


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gate_and_up_of_experts_may_be_apart(kind: str, tmp_path: Path) -> None:
    folder = folder_of("experts", tmp_path / "model")
    paths = [write_gguf(folder, tmp_path / f"{stacks}.gguf", kind, stacks=stacks) for stacks in (True, False)]
    names = [GgufHeader.read(path).tensors.keys() for path in paths]
    assert names[0] - names[1] == {f"blk.{layer}.ffn_gate_up_exps.weight" for layer in range(8)}
    assert names[1] - names[0] == {
        f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(8) for part in ("gate", "up")
    }
    assert answer_of(paths[0]) == answer_of(paths[1])
    header = GgufHeader.read(paths[0])
    both = {**header.tensors, "blk.0.ffn_up_exps.weight": GgufHeader.read(paths[1]).tensors["blk.0.ffn_up_exps.weight"]}
    with pytest.raises(CheckpointError, match=r"ffn_up_exps\.weight' is 'given twice'; allowed: each once"):
        GgufTensors(replace(header, tensors=both))


def planned_bytes(path: Path, **settings: Any) -> int:
    """Return the memory that a plan expects for the weights of a model."""
    config = EngineConfig(model=str(path), skip_tokenizer_init=True, **settings)
    return plan_engine(config).backend.facts.weight_bytes


@pytest.mark.parametrize(
    ("kind", "table", "weights", "is_mapped"),
    [
        *(("Q8_0", "Q8_0", "auto", True), ("Q8_0", "Q8_0", "widened", False), ("BF16", "BF16", "auto", True)),
        *(("F16", "F16", "auto", True), ("Q8_0", "F16", "auto", True), ("Q8_0", "BF16", "widened", True)),
        ("Q8_0", "F16", "widened", False),
    ],
)
def test_the_table_of_layer_inputs_takes_memory_only_as_a_copy(
    kind: str, table: str, weights: str, is_mapped: bool, tmp_path: Path
) -> None:
    name, made = "model.embed_tokens_per_layer.weight", gguf.GGMLQuantizationType[table]
    folder = folder_of("small", tmp_path / "model")
    blocks = gguf.quants.quantize(load_file(folder / "model.safetensors")[name], made)
    path = write_gguf(folder, tmp_path / "m.gguf", kind, {name: (table, blocks)})
    source = GgufFile(path)
    block_types = source.block_types() if weights == "auto" else {}
    row_bytes = 128 * 34 // 32 if block_types.get(name) == "Q8_0" else 128 * 2
    expected = weight_bytes(
        read_model(source).spec, "bfloat16", "auto", block_types, compact=kernels_for(None).has_compact
    )
    assert planned_bytes(path, weights=weights) == expected - is_mapped * 128 * row_bytes


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("kind", ["Q2_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "Q5_0", "F16"])
def test_rows_of_a_packed_table_are_looked_up_as_the_numbers_that_they_stand_for(
    kind: str, backend: str, tmp_path: Path
) -> None:
    """All types of files in use; the table has 256 columns, one block of the larger types."""
    name = "model.embed_tokens_per_layer.weight"
    folder = write_tiny_gemma4(
        tmp_path / "model",
        **{"rms_norm_eps": 1e-6, "rope_parameters": ROPES, "hidden_size_per_layer_input": 32},
        per_layer_config={layer: {"head_dim": 64} for layer in "357"},
    )
    blocks, numbers = blocks_of(kind, 128, 256)
    tensors = {each: np.array(found) for each, found in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {name: numbers}, folder / "model.safetensors")
    path = write_gguf(folder, tmp_path / "m.gguf", blocks={name: (kind, blocks)})
    assert GgufFile(path).block_types() == {name: kind}
    assert answer_of(path, backend) == answer_of(folder, backend)


@pytest.mark.parametrize("form", ["small", "experts"])
def test_blocks_of_every_matrix_stay_packed(form: str, tmp_path: Path) -> None:
    folder = folder_of(form, tmp_path / "model")
    plain, path = load_file(folder / "model.safetensors"), write_gguf(folder, tmp_path / "m.gguf", "Q8_0")
    source, made = GgufFile(path), gguf.GGMLQuantizationType.Q8_0
    spec, tensors, block_types = read_model(source).spec, source.tensors(), source.block_types()
    assert ("model.layers.7.experts.5.up_proj.weight" in block_types) == (form == "experts")
    for name in block_types:
        assert np.array_equal(tensors.block_rows(name), gguf.quants.quantize(plain[name], made)), name
    assert (
        planned_bytes(path) < weight_bytes(spec, "bfloat16", "auto", block_types) + 1 < weight_bytes(spec, "bfloat16")
    )
    reader = WeightReader(spec, tensors, "float32", block_types=block_types)
    embedding = reader.model().get(Part.LAYER_EMBEDDING)
    assert (embedding is not None and embedding.blocks == "Q8_0") == (form == "small")
    save_file({name: tensors.tensor(name).copy() for name in tensors.entries}, folder / "model.safetensors")
    assert answer_of(path, weights="widened") == answer_of(folder)
    assert answer_of(path)[0]


def test_keys_and_values_of_layers_that_attend_to_others_are_left_out(tmp_path: Path) -> None:
    folder = folder_of("small", tmp_path / "model")
    plain = answer_of(folder)
    tensors = {name: np.array(each) for name, each in load_file(folder / "model.safetensors").items()}
    unused = {
        name.replace("layers.4.", "layers.6."): each
        for name, each in tensors.items()
        if name.startswith("model.layers.4.self_attn.") and name.split(".")[-2] in ("k_proj", "v_proj", "k_norm")
    }
    save_file(tensors | unused, folder / "model.safetensors")
    path = write_gguf(folder, tmp_path / "m.gguf")
    assert {"blk.6.attn_k.weight", "blk.6.attn_v.weight", "blk.6.attn_k_norm.weight"} < GgufHeader.read(
        path
    ).tensors.keys()
    assert answer_of(path) == answer_of(folder) == plain


def test_files_of_ollama_have_the_tensors_for_images_and_sound(small: GgufHeader, tmp_path: Path) -> None:
    plain = small.tensors["output_norm.weight"]
    names = (
        "v.blk.0.attn_q.weight",
        "v.clamp_data",
        "mm.input_projection.weight",
        "mm.a.fc.bias",
        "a.blk.0.ln1.weight",
    )
    of_ollama = replace(small, tensors={**small.tensors, **dict.fromkeys(names, plain)})
    spec = spec_of(of_ollama, tmp_path / "ollama")
    assert spec == spec_of(small, tmp_path / "plain")
    WeightReader(spec, GgufTensors(of_ollama), "float32")
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensors \(extra: w\.blk\) is "):
        WeightReader(spec, GgufTensors(replace(of_ollama, tensors={**small.tensors, "w.blk": plain})), "float32")


def test_sizes_that_are_the_same_in_all_layers_may_be_lists(small: GgufHeader, tmp_path: Path) -> None:
    listed = {"gemma4.attention.head_count_kv": [2] * 8, "gemma4.attention.head_count": [4] * 8}
    spec = spec_of(replace(small, settings={**small.settings, **listed}), tmp_path / "listed")
    assert spec == spec_of(small, tmp_path / "plain")
    without = {key: each for key, each in small.settings.items() if key != "gemma4.attention.head_count_kv"}
    assert spec_of(replace(small, settings=without), tmp_path / "none").attention.num_kv_heads == 4


REFUSED: dict[str, tuple[str, Any, str]] = {
    "no windows": (
        "attention.sliding_window_pattern",
        None,
        r"is None; allowed: a list of booleans, one for each of the 8",
    ),
    "too few windows": (
        "attention.sliding_window_pattern",
        [True, False],
        r"allowed: a list of booleans, one for each",
    ),
    "numbers": (
        "attention.sliding_window_pattern",
        [1] * 7 + [0],
        r"allowed: a list of booleans, one for each of the 8",
    ),
    "a window at the end": ("attention.sliding_window_pattern", [True] * 8, r"the last one false"),
    "shared by all": ("attention.shared_kv_layers", 8, r"shared_kv_layers is 8; allowed: an integer from 0 to 7"),
    "too few heads": (
        "attention.head_count_kv",
        [2, 2, 1],
        r"head_count_kv is \[2, 2, 1\]; allowed: an integer from 1",
    ),
    "heads as text": ("attention.head_count_kv", [2] * 7 + ["2"], r"head_count_kv is '2'; allowed: an integer from 1"),
    "values": ("attention.value_length", 32, r"value_length is 32; allowed: 64, as attention\.key_length"),
    "near values": (
        "attention.value_length_swa",
        64,
        r"value_length_swa is 64; allowed: 32, as attention\.key_length_swa",
    ),
    "near size": ("attention.key_length_swa", None, r"key_length_swa is None; allowed: an integer from 1"),
    "rotation": ("rope.dimension_count", 16, r"dimension_count is 16; allowed: 64, as attention\.key_length"),
    "near rotation": ("rope.dimension_count_swa", 16, r"dimension_count_swa is 16; allowed: 32, as attention\.key_"),
    "scaling": ("rope.scaling.type", "yarn", r"rope\.scaling\.type is 'yarn'; allowed: none"),
    "widths": ("feed_forward_length", [96] * 7 + [192], r"allowed: one size, or twice as much for the layers without"),
    "window": ("attention.sliding_window", 0, r"sliding_window is 0; allowed: an integer from 1"),
    "inputs": ("embedding_length_per_layer_input", -1, r"per_layer_input is -1; allowed: an integer from 0"),
    "cap": ("final_logit_softcapping", "thirty", r"final_logit_softcapping is 'thirty'; allowed: a number"),
    "experts": ("expert_count", 4, r"expert_used_count is None; allowed: an integer from 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_do_not_fit_are_refused_by_their_names(name: str, small: GgufHeader) -> None:
    key, value, said = REFUSED[name]
    header = replace(small, settings={**small.settings, f"gemma4.{key}": value})
    with pytest.raises(CheckpointError, match=said):
        config_of(header, GgufTensors(header).setting)


@pytest.mark.parametrize(
    ("divisors", "said"),
    [
        (None, r"m\.gguf: tensor 'rope_freqs\.weight' is 'missing'; allowed: 32 numbers: some 1, then 1e\+30"),
        ([1.0] * 8, r"is \[1\.0, 1\.0, .*\]; allowed: 32 numbers"),
        ([1.0] * 8 + [8.0] * 24, r"is \[1\.0, 1\.0, .*\]; allowed: 32 numbers"),
        ([1.0] * 8 + [1e30] * 23 + [1.0], r"is \[1\.0, 1\.0, .*\]; allowed: 32 numbers"),
        ([float("nan")] * 32, r"is \[nan, nan, .*\]; allowed: 32 numbers"),
        ([1.0] * 8 + [float("nan")] * 24, r"is \[1\.0, 1\.0, .*\]; allowed: 32 numbers"),
        ([1e30] * 32, r"allowed: 32 numbers: some 1"),
    ],
)
def test_positions_are_those_of_dimensions_that_rotate_and_of_others(
    divisors: list[float] | None, said: str, small: GgufHeader
) -> None:
    found = None if divisors is None else np.array(divisors, np.float32)
    with pytest.raises(CheckpointError, match=said):
        config_of(small, lambda name: found)


def test_a_stack_that_cannot_be_halved_is_no_stack(sparse: GgufHeader, tmp_path: Path) -> None:
    name = "blk.0.ffn_gate_up_exps.weight"
    spec, stack = spec_of(sparse, tmp_path / "spec"), sparse.tensors[name]
    assert stack.shape == (6, 64, 64)
    for shape, said in (
        ((6, 63, 64), r"missing: .*extra: blk\.0\.ffn_gate_up_exps"),
        ((6, 32, 64), "wrong shape: blk"),
    ):
        changed = replace(sparse, tensors={**sparse.tensors, name: replace(stack, shape=shape)})
        with pytest.raises(CheckpointError, match=said):
            WeightReader(spec, GgufTensors(changed), "float32")
    many = replace(sparse, tensors={**sparse.tensors, name: replace(stack, shape=(1 << 40, 2, 1))})
    with pytest.raises(
        CheckpointError, match=r"gate_up_exps\.weight' is '1099511627776 experts'; allowed: at most 4096"
    ):
        GgufTensors(many)


def test_adapters_of_gate_and_up_together_are_refused(sparse: GgufHeader, tmp_path: Path) -> None:
    """They share A, of which the reader knows no part that belongs to one of them."""
    spec, path = spec_of(sparse, tmp_path / "spec"), tmp_path / "tune.gguf"
    writer = gguf.GGUFWriter(path, "gemma4")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for end, shape in {"lora_a": (6, 4, 64), "lora_b": (6, 64, 4)}.items():
        writer.add_tensor(f"blk.0.ffn_gate_up_exps.weight.{end}", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.gate_proj\.lora_A: shape is \[6, 4, 64\]; allowed: a matrix"
    ):
        read_adapter(path, spec, 16)
