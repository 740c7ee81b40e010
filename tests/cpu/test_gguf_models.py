"""A GGUF file computes what the folder computes that it was made from, for every architecture, to the bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from quire import LLM, SamplingParams
from quire.cli.model_shapes import shape_of
from quire.cli.plan.sizing import EngineSizer
from quire.compute.gguf import tensors as tensors_module
from quire.compute.gguf.blocks import BLOCK_TYPES
from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.settings import config_of
from quire.compute.gguf.source import GgufFile
from quire.compute.gguf.tensors import GgufTensors
from quire.compute.models import read_model
from quire.compute.models.rope import FULL, SLIDING
from quire.compute.models.source import ModelFolder
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader, expected_tensors, weight_bytes
from quire.compute.weights.stacked import unstacked
from quire.core.config import EngineConfig
from quire.core.errors import CheckpointError, ModelError
from quire.engine.factory import plan_engine
from quire.instruments.bench.quality import ReadingEngine
from support.gguf_errors import require_named
from support.gguf_models import write_gguf

DATA = Path(__file__).parents[1] / "golden" / "data"
CHANGES: dict[str, dict[str, Any]] = {  # what a GGUF file cannot say is as it is there
    "mistral": {"sliding_window": None},
    "qwen2-moe": {"mlp_only_layers": []},
    "qwen3-moe": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "layer_types": None, "num_hidden_layers": 7},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4, "use_sliding_window": False, "layer_types": None},
    "cohere2": {"layer_types": None, "num_hidden_layers": 5},
    "glm": {"head_dim": 8},  # a part of the hidden size for each head
    "lfm2-moe": {"routed_scaling_factor": 1.0},
    "starcoder2": {"sliding_window": None},
    "minicpm3": {"dim_model_base": 256},
    "deepseek-v2-lite": {
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10_000.0, "mscale": 0.707, "mscale_all_dim": 0.707},
            **{"factor": 4.0, "original_max_position_embeddings": 64},
        }
    },
    "afmoe": {"layer_types": None, "num_hidden_layers": 5, "moe_intermediate_size": 16},
    "ernie4-5-moe": {"moe_layer_end_index": -1},
    "exaone": {
        "architectures": ["ExaoneForCausalLM"],  # as the makers have it
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
    "olmo": {"layer_norm_eps": 1e-5},  # as the converter has it
    "falcon-h1": {
        **{"attention_in_multiplier": 1.0, "key_multiplier": 1.0},
        **{"embedding_multiplier": 1.0, "lm_head_multiplier": 1.0},
    },
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    "llama4": {
        **{"moe_layers": None, "interleave_moe_layer_step": 2, "layer_types": None, "no_rope_layers": None},
        **{"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1},
    },
    "solar-open": {"intermediate_size": 48, "first_k_dense_replace": 0},
    "dots1": {"sliding_window": None, "layer_types": None},
    "deepseek-v3": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
}
FORMS = (
    *("llama", "llama-tied", "llama-2", "llama-linear", "llama-yarn", "llama-longrope", "mistral", "qwen2", "tied"),
    *("qwen3-moe", "gemma2", "gemma3", "phi3", "gpt2", "smollm3", "olmo2", "olmo3", "granite", "glm", "glm4"),
    *(
        "gemma",
        "gemma3n",
        "gemma4",
        "gemma4-keys",
        "gemma4-moe",
        "gemma4-unified",
        "glm4-moe",
        "granite-moe",
        "mixtral",
        "olmoe",
        "qwen2-moe",
    ),
    *("ernie4-5", "lfm2", "lfm2-moe", "ministral3", "seed-oss"),
    *("arcee", "exaone", "exaone4", "granite-hybrid", "granite-moe-shared", "hunyuan"),
    *("cohere", "cohere2", "starcoder2", "stablelm", "falcon", "gpt-neox", "phi", "gpt-oss"),
    *("deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "minicpm3"),
    *("afmoe", "dots1", "ernie4-5-moe", "exaone-moe", "hunyuan-moe", "minimax-m2", "nemotron", "solar-open", "youtu"),
    *("apertus", "falcon-h1", "jais2", "llama4", "mamba2", "olmo"),
)
PACKED = ("F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")  # those that the gguf package can pack
PROMPT = [(7 * i * i + 3 * i + 5) % 64 for i in range(40)]


@cache
def goldens() -> dict[str, tuple[dict[str, Any], Path]]:
    """Return the config and the weights of each golden model, by its form."""
    return {
        form: (found["config"], file.parent / found.get("weights", "model.safetensors"))
        for file in DATA.glob("*/cases.json")
        for form, found in json.loads(file.read_text())["forms"].items()
        if "config" in found
    }


def golden(form: str, folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write the golden model of a form into a folder, with what a GGUF file can say of it."""
    config, weights = goldens()[form]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | CHANGES.get(form, {}) | (changes or {})))
    shutil.copy(weights, folder / "model.safetensors")
    return _complete(folder)


def _complete(folder: Path) -> Path:
    """Leave the tensors in a folder that its settings ask for, as float32; make those up that it lacks."""
    checkpoint, random = unstacked(Checkpoint.open(folder)), np.random.default_rng(0)
    spec = read_model(ModelFolder(folder)).spec
    tensors: dict[str, Any] = {}
    for name, shape in expected_tensors(spec).items():
        stored = name if name in checkpoint.entries else name.removeprefix(spec.optional_prefix)
        known = stored in checkpoint.entries and checkpoint.entries[stored].shape == shape
        tensors[name] = checkpoint.tensor(stored).copy() if known else random.normal(0, 0.1, shape).astype(np.float32)
        if ".A_log" in name:
            tensors[name][:] = 0  # which survives exp and log
    save_file(tensors, folder / "model.safetensors")
    return folder


def answer_of(model: Path, dtype: str, weights: str = "auto") -> tuple[Sequence[int], str]:
    """Return the tokens that a model writes, and their log-probabilities."""
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    settings = {"dtype": dtype, "weights": weights, "kv_memory": "4MiB"}
    with LLM(str(model), backend="native", skip_tokenizer_init=True, **settings) as llm:
        (output,) = llm.generate([PROMPT], sampling, use_tqdm=False)
    return output.outputs[0].token_ids, str(output.outputs[0].logprobs)


@pytest.mark.parametrize("form", FORMS)
def test_a_file_has_the_architecture_and_the_weights_of_its_folder(form: str, tmp_path: Path) -> None:
    folder = golden(form, tmp_path / "model")
    path = write_gguf(folder, tmp_path / "model.gguf")
    ours, theirs = read_model(GgufFile(path)), read_model(ModelFolder(folder))
    assert ours.spec.layers == theirs.spec.layers
    scales = ("embedding_scale", "residual_scale", "logit_scale", "logit_soft_cap")
    for part in ("mlp", "experts", *scales, "tied_head", "context_length", "vocab_size", "parallel", "shared_norm"):
        assert getattr(ours.spec, part) == getattr(theirs.spec, part)
    assert replace(ours.spec.attention, qk_norm=None) == replace(theirs.spec.attention, qk_norm=None)
    assert answer_of(path, "float32") == answer_of(folder, "float32")


def test_the_divided_positions_of_llama_3_are_those_that_its_settings_scale(tmp_path: Path) -> None:
    folder = golden("llama-3", tmp_path / "model")
    ours = read_model(GgufFile(write_gguf(folder, tmp_path / "model.gguf"))).spec.layers[0].rope
    theirs = read_model(ModelFolder(folder)).spec.layers[0].rope
    assert ours is not None and theirs is not None
    assert ours.inverse_frequencies == pytest.approx(theirs.inverse_frequencies, rel=1e-6)


@pytest.mark.parametrize("kind", PACKED)
def test_widened_weights_compute_what_the_numbers_compute_that_they_stand_for(kind: str, tmp_path: Path) -> None:
    folder = golden("tied", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "packed.gguf", kind)
    tensors = GgufFile(path).tensors()
    assert {entry.dtype for entry in tensors.entries.values()} == {kind, "F32"}
    save_file({name: tensors.tensor(name).copy() for name in tensors.entries}, folder / "model.safetensors")
    assert answer_of(path, "bfloat16", "widened") == answer_of(folder, "bfloat16")


@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        *(("llama", MODEL_ARCH.INTERNLM2), ("mistral", MODEL_ARCH.MISTRAL3)),
        *(("qwen2", MODEL_ARCH.QWEN2VL), ("tied", MODEL_ARCH.QWEN3VL), ("qwen3-moe", MODEL_ARCH.QWEN3VLMOE)),
    ],
)
def test_files_of_other_architectures_have_the_text_model_of_a_family(
    form: str, architecture: MODEL_ARCH, tmp_path: Path
) -> None:
    folder = golden(form, tmp_path / "model")
    path = write_gguf(folder, tmp_path / "m.gguf", architecture=architecture)
    assert GgufHeader.read(path).settings["general.architecture"] == MODEL_ARCH_NAMES[architecture]
    ours, theirs = read_model(GgufFile(path)).spec, read_model(ModelFolder(folder)).spec
    assert (ours.attention, ours.layers, ours.mlp) == (theirs.attention, theirs.layers, theirs.mlp)
    assert answer_of(path, "float32") == answer_of(folder, "float32")


@pytest.mark.parametrize(
    ("form", "settings", "said"),
    [
        (
            "granite",
            {"granite.rope.scaling.finetuned": False},
            r"finetuned is False; allowed: true: no Granite without",
        ),
        ("granite-hybrid", {"granite.attention.head_count_kv": [2, 1]}, r"is \[2, 1\]; allowed: an integer from 1"),
        ("olmoe", {"olmoe.attention.clamp_kqv": 8.0}, r"is 8\.0; allowed: none: no queries, keys and values are"),
        ("llama", {"llama.rope.dimension_count": 8}, r"rope\.dimension_count is 8; allowed: 16, the size of a head"),
        ("tied", {"qwen3.rope.dimension_count": 8}, r"rope\.dimension_count is 8; allowed: 32, the size of a head"),
        ("olmo3", {"olmo2.rope.freq_base_swa": 9.0}, r"rope\.freq_base_swa is 9\.0; allowed: 10000\.0, as rope"),
        (
            "deepseek-v3",
            {"deepseek2.expert_gating_func": 3},
            r"expert_gating_func is 3; allowed: an integer from 1 to 2",
        ),
    ],
)
def test_what_no_engine_computes_is_refused_by_the_setting(
    form: str, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    header = GgufHeader.read(write_gguf(golden(form, tmp_path / "model"), tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=said):
        config_of(replace(header, settings={**header.settings, **settings}), lambda name: None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        ({"scale_linear": 2.5, "scaling.type": "yarn", "scaling.factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "", "scaling.factor": 0.0}, None),
        ({"scaling.type": "yarn"}, None),
    ],
)
def test_a_factor_of_positions_without_a_type_is_a_linear_one(
    settings: dict[str, Any], expected: object, tmp_path: Path
) -> None:
    header = GgufHeader.read(write_gguf(golden("llama", tmp_path / "model"), tmp_path / "m.gguf"))
    scaled = {**header.settings, **{f"llama.rope.{name}": value for name, value in settings.items()}}
    assert config_of(replace(header, settings=scaled), lambda name: None).get("rope_scaling") == expected


@pytest.mark.parametrize(
    ("form", "architecture", "pattern", "windows"),
    [
        ("gemma2", "gemma2", 1, [False, False]),
        ("gemma3", "gemma3", 2, [True, False] * 3 + [True]),
        ("gpt-oss", "gpt-oss", [False, True], [False, True]),
        ("cohere2", "cohere2", 5, [True] * 4 + [False]),
        ("exaone4", "exaone4", 2, [True, False, True]),
    ],
)
def test_files_say_which_layers_have_a_window(
    form: str, architecture: str, pattern: object, windows: list[bool], tmp_path: Path
) -> None:
    header = GgufHeader.read(write_gguf(golden(form, tmp_path / "model"), tmp_path / "m.gguf"))
    settings = {**header.settings, f"{architecture}.attention.sliding_window_pattern": pattern}
    found = config_of(replace(header, settings=settings), lambda name: None)
    assert found["layer_types"] == [SLIDING if has_window else FULL for has_window in windows]


def test_the_first_files_of_gemma_2_leave_out_its_caps_and_its_window(tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(golden("gemma2", tmp_path / "model"), tmp_path / "m.gguf"))
    left_out = {f"gemma2.{name}" for name in ("attn_logit_softcapping", "final_logit_softcapping")}
    left_out.add("gemma2.attention.sliding_window")
    settings = {name: value for name, value in header.settings.items() if name not in left_out}
    assert len(settings) == len(header.settings) - 3
    found = config_of(replace(header, settings=settings), lambda name: None)
    assert [found["attn_logit_softcapping"], found["final_logit_softcapping"]] == [50.0, 30.0]
    assert found["sliding_window"] == 4096


def test_positions_of_texts_have_three_equal_parts(tmp_path: Path) -> None:
    folder = golden("qwen2", tmp_path / "model")
    header = GgufHeader.read(write_gguf(folder, tmp_path / "m.gguf", architecture=MODEL_ARCH.QWEN2VL))
    settings = {**header.settings, "qwen2vl.rope.dimension_sections": [1, 1, 1, 1]}
    with pytest.raises(CheckpointError, match=r"sections is \[1, 1, 1, 1\]; allowed: a list with 0 as its fourth"):
        config_of(replace(header, settings=settings), lambda name: None)


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    folder = golden("glm4-moe", tmp_path / "model")
    plain = answer_of(folder, "float32")
    tensors = {name: np.array(each) for name, each in load_file(folder / "model.safetensors").items()}
    last = "model.layers.2."
    further = {name.replace(last, "model.layers.3."): each for name, each in tensors.items() if name.startswith(last)}
    hidden = {
        "eh_proj": (32, 64),
        "enorm": (32,),
        "hnorm": (32,),
        "shared_head.norm": (32,),
        "shared_head.head": (64, 32),
    }
    further |= {f"model.layers.3.{name}.weight": np.ones(shape, np.float32) for name, shape in hidden.items()}
    save_file(tensors | further, folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"num_nextn_predict_layers": 1}))
    path = write_gguf(folder, tmp_path / "m.gguf")
    assert "blk.3.nextn.eh_proj.weight" in GgufHeader.read(path).tensors
    assert read_model(GgufFile(path)).spec.layers == read_model(ModelFolder(folder)).spec.layers
    assert answer_of(path, "float32") == answer_of(folder, "float32") == plain


def test_a_matrix_of_one_row_may_be_a_vector(tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(golden("qwen2-moe", tmp_path / "model"), tmp_path / "m.gguf"))
    stored, ours = "blk.2.ffn_gate_inp_shexp.weight", "model.layers.2.mlp.shared_expert_gate.weight"
    assert header.tensors[stored].shape == (1, 32)
    older = {**header.tensors, stored: replace(header.tensors[stored], shape=(32,))}
    found, expected = GgufTensors(replace(header, tensors=older)).tensor(ours), GgufTensors(header).tensor(ours)
    assert found.shape == (1, 32)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_first_mixtral_files_have_a_tensor_for_each_expert(kind: str, tmp_path: Path) -> None:
    folder = golden("mixtral", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "old.gguf", kind, stacks=False)
    header = GgufHeader.read(path)
    assert {"blk.0.ffn_gate.0.weight", "blk.1.ffn_down.4.weight"} < header.tensors.keys()
    assert answer_of(path, "float32") == answer_of(write_gguf(folder, tmp_path / "m.gguf", kind), "float32")
    stored = GgufTensors(header).stored_name
    assert {stored(name) for name in expected_tensors(read_model(GgufFile(path)).spec)} == header.tensors.keys()
    more = {**header.tensors, "blk.0.ffn_up.7.weight": header.tensors["blk.0.ffn_up.3.weight"]}
    with pytest.raises(CheckpointError, match=r"old\.gguf: tensors \(extra: blk\.0\.ffn_up\.7\.weight\) is "):
        WeightReader(read_model(GgufFile(path)).spec, GgufTensors(replace(header, tensors=more)), "float32")
    stack = replace(header.tensors["blk.0.ffn_up.3.weight"], shape=(1, 48, 32))
    both = {**header.tensors, "blk.0.ffn_up_exps.weight": stack}
    with pytest.raises(CheckpointError, match=r"ffn_up_exps\.weight' is 'given twice'; allowed: each once"):
        GgufTensors(replace(header, tensors=both))


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_the_first_glm_4_may_have_query_key_and_value_in_one_tensor(kind: str, tmp_path: Path) -> None:
    folder = golden("glm", tmp_path / "model")
    apart, fused = (
        write_gguf(folder, tmp_path / "a.gguf", kind),
        write_gguf(folder, tmp_path / "f.gguf", kind, fuses=True),
    )
    assert "model.layers.0.self_attn.qkv_proj.bias" in GgufFile(fused).tensors().entries
    assert answer_of(fused, "float32") == answer_of(apart, "float32")


def test_glm_4_with_positions_of_images_is_refused_by_the_setting(tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(golden("glm4", tmp_path / "model"), tmp_path / "m.gguf"))
    settings = {**header.settings, "glm4.rope.dimension_sections": [8, 12, 12, 0]}
    with pytest.raises(CheckpointError, match=r"glm4\.rope\.dimension_sections is .*allowed: none: no positions"):
        config_of(replace(header, settings=settings), lambda name: None)


def logits_of(model: Path, **settings: Any) -> NDArray[np.float64]:
    """Return the log-probabilities of all tokens after each token of a prompt."""
    config = EngineConfig(model=str(model), skip_tokenizer_init=True, dtype="float32", kv_memory="4MiB", **settings)
    with ReadingEngine(config) as engine:
        return engine.read(PROMPT)


@pytest.mark.parametrize("kind", PACKED[2:])
def test_blocks_stay_packed_and_differ_only_by_the_rounding_of_rows(kind: str, tmp_path: Path) -> None:
    folder = golden("tied", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "packed.gguf", kind)
    source = GgufFile(path)
    spec, block_types = read_model(source).spec, source.block_types()
    assert set(block_types.values()) == {kind}
    planned = plan_engine(EngineConfig(model=str(path), skip_tokenizer_init=True)).backend.facts.weight_bytes
    assert planned == weight_bytes(spec, "bfloat16", "auto", block_types) < weight_bytes(spec, "bfloat16")
    packed, widened = logits_of(path), logits_of(path, weights="widened")
    assert 0 < np.std(packed - widened) < 0.05 * np.std(widened)
    for settings in ({"num_threads": 2}, {"max_num_batched_tokens": 3}, {"block_size": 64}):
        assert np.array_equal(logits_of(path, **settings), packed)


@pytest.mark.parametrize(
    ("form", "kind"), [("tied", "Q4_0"), ("llama", "Q5_1"), ("qwen3-moe", "Q8_0"), ("gpt2", "Q8_0"), ("cohere", "Q4_0")]
)
def test_plans_and_simulations_count_the_bytes_that_an_engine_holds(form: str, kind: str, tmp_path: Path) -> None:
    path = write_gguf(golden(form, tmp_path / "model"), tmp_path / "m.gguf", kind)
    for weights in ("auto", "widened", "int8", "int4"):
        config = EngineConfig(model=str(path), skip_tokenizer_init=True, weights=weights, dtype="bfloat16")
        sized = EngineSizer(config, GgufFile(path)).size(config.resolved(), 1 << 33)
        shape = shape_of("m", read_model(GgufFile(path)), sized.facts)
        assert dict(sized.plan.parts)["weights"] == sized.facts.weight_bytes
        assert shape.weight_bytes("bfloat16", sized.facts.weights) == sized.facts.weight_bytes
        assert shape.is_packed == (weights == "auto")
        plain = shape_of("m", read_model(GgufFile(path)))
        assert (plain.weight_bytes("bfloat16", "auto") > sized.facts.weight_bytes) == (
            weights != "widened" or sized.facts.compact
        )
        assert plain.num_parameters == shape.num_parameters


def test_parts_of_a_matrix_are_rows_of_the_whole(tmp_path: Path) -> None:
    folder = golden("tied", tmp_path / "model")
    tensors = GgufFile(write_gguf(folder, tmp_path / "packed.gguf", "Q8_0")).tensors()
    for name in ("model.embed_tokens.weight", "model.layers.1.self_attn.q_proj.weight"):
        whole = tensors.tensor(name)
        assert not whole.flags.writeable
        assert tensors.tensor(name, slice(3, 40)).tobytes() == whole[3:40].tobytes()
        assert tensors.bfloat16_bits(name, slice(0, 5)).tobytes() == tensors.bfloat16_bits(name)[:5].tobytes()


def test_bfloat16_numbers_are_mapped_and_others_are_rounded(tmp_path: Path) -> None:
    folder = golden("llama", tmp_path / "model")
    for kind in ("BF16", "F16"):
        tensors = GgufFile(write_gguf(folder, tmp_path / f"{kind}.gguf", kind)).tensors()
        for part in ("q_proj", "o_proj"):  # of which the file has the first in another order
            name = f"model.layers.1.self_attn.{part}.weight"
            bits, again = tensors.bfloat16_bits(name), tensors.bfloat16_bits(name, slice(3, 9))
            assert np.array_equal(bits.reshape(-1), narrowed(tensors.tensor(name).reshape(-1)))
            assert np.array_equal(bits[3:9], again)
            assert not bits.flags.writeable
            assert np.shares_memory(bits, again) == (kind == "BF16" and part == "o_proj")


def test_a_file_that_was_made_shorter_is_refused_when_it_is_mapped(tmp_path: Path) -> None:
    path = write_gguf(golden("tied", tmp_path / "model"), tmp_path / "m.gguf")
    tensors = GgufFile(path).tensors()
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"m\.gguf: size is \d+; allowed: \d+ bytes, as when it was checked"):
        tensors.tensor("model.embed_tokens.weight")


def test_what_the_folder_cannot_run_the_file_cannot_either(tmp_path: Path) -> None:
    path = write_gguf(golden("tied", tmp_path / "model"), tmp_path / "m.gguf")
    data = path.read_bytes()
    path.write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: tensors \(missing: blk\.1\.attn_q\.weight; extra: blk\.1\.attn_x\.weight\)"
    ):
        LLM(str(path), backend="native", kv_memory="4MiB", skip_tokenizer_init=True)
    key, architecture = b"general.architecture", b"qwen3"
    start = data.index(architecture, data.index(key))
    path.write_bytes(data[:start] + b"rwkv7" + data[start + 5 :])
    with pytest.raises(
        ModelError,
        match=r"a model of the architecture 'rwkv7', which quire cannot run\. Use one of afmoe, apertus, arcee, bert",
    ):
        read_model(GgufFile(path))


def test_norms_of_heads_in_a_stablelm_are_refused_by_their_name(tmp_path: Path) -> None:
    path = write_gguf(golden("stablelm", tmp_path / "model"), tmp_path / "m.gguf")
    header, spec = GgufHeader.read(path), read_model(GgufFile(path)).spec
    norms = {"blk.0.attn_q_norm.weight": replace(header.tensors["output_norm.weight"], shape=(4, 8))}
    more = GgufTensors(replace(header, tensors={**header.tensors, **norms}))
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensors \(extra: blk\.0\.attn_q_norm\.weight\) is "):
        WeightReader(spec, more, "float32")


def test_the_experts_of_all_tensors_are_counted_together(tmp_path: Path) -> None:
    header = GgufHeader.read(write_gguf(golden("qwen3-moe", tmp_path / "model"), tmp_path / "m.gguf"))
    many = replace(header.tensors["blk.0.ffn_gate_exps.weight"], shape=(4096, 1, 1))
    tensors = {f"blk.{layer}.ffn_gate_exps.weight": many for layer in range(65)}
    with pytest.raises(CheckpointError, match=r"each expert as one is '266240 and more'; allowed: at most 262144"):
        GgufTensors(replace(header, tensors=tensors))


@pytest.mark.parametrize("form", FORMS)
def test_errors_name_the_tensors_of_the_file(form: str, tmp_path: Path) -> None:
    path = write_gguf(golden(form, tmp_path / "model"), tmp_path / "m.gguf")
    header, spec = GgufHeader.read(path), read_model(GgufFile(path)).spec
    stored = GgufTensors(header).stored_name
    names = {stored(name) for name in expected_tensors(spec)}
    assert names == header.tensors.keys() - {*tensors_module.SETTINGS}
    assert stored("model.layers.0.unknown.weight") == "model.layers.0.unknown.weight"
    require_named(header, spec, names, lambda tensor: 16 if tensor.shape[-1] == 8 else 8)


def test_the_tables_of_a_file_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(golden("llama", tmp_path / "model"), tmp_path / "m.gguf")
    made, entries = [], tensors_module._entries
    monkeypatch.setattr(tensors_module, "_entries", lambda *given: made.append(given) or entries(*given))
    with LLM(str(path), backend="native", kv_memory="4MiB", skip_tokenizer_init=True) as llm:
        llm.generate([PROMPT], SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(made) == 1


def test_as_many_experts_as_no_model_has_are_refused_before_they_are_named(tmp_path: Path) -> None:
    path = write_gguf(golden("qwen3-moe", tmp_path / "model"), tmp_path / "m.gguf")
    header = GgufHeader.read(path)
    name = "blk.0.ffn_gate_exps.weight"
    many = replace(header.tensors[name], shape=(1 << 40, 1, 1))
    with pytest.raises(
        CheckpointError, match=r"ffn_gate_exps\.weight' is '1099511627776 experts'; allowed: at most 4096"
    ):
        GgufTensors(replace(header, tensors={**header.tensors, name: many}))


def test_latents_of_old_files_are_those_of_new_ones(tmp_path: Path) -> None:
    """Before latents were run as they are, files had what makes keys and values of them in one tensor."""
    folder = golden("deepseek-v2", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "old.gguf", splits=False)
    assert {"blk.0.attn_kv_b.weight"} < GgufHeader.read(path).tensors.keys()
    assert read_model(GgufFile(path)).spec == read_model(ModelFolder(folder)).spec
    assert answer_of(path, "float32") == answer_of(folder, "float32")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_what_makes_keys_of_latents_is_widened(kind: str, tmp_path: Path) -> None:
    folder = golden("deepseek-v2-lite", tmp_path / "model")
    path = write_gguf(folder, tmp_path / "m.gguf", kind)
    spec, block_types = read_model(GgufFile(path)).spec, GgufFile(path).block_types()
    assert not any(part in name for name in block_types for part in ("k_b_proj", "v_b_proj"))
    planned = plan_engine(EngineConfig(model=str(path), skip_tokenizer_init=True)).backend.facts.weight_bytes
    assert planned == weight_bytes(spec, "bfloat16", "auto", block_types) < weight_bytes(spec, "bfloat16")
    packed, widened = logits_of(path), logits_of(path, weights="widened")
    assert 0 < np.std(packed - widened) < 0.05 * np.std(widened)


def test_a_model_with_scores_by_position_is_refused(tmp_path: Path) -> None:
    path = write_gguf(golden("deepseek-v2", tmp_path / "model"), tmp_path / "m.gguf")
    header = GgufHeader.read(path)
    settings = {**header.settings, "deepseek2.attention.temperature_scale": 0.1}
    with pytest.raises(CheckpointError, match=r"temperature_scale is 0\.1; allowed: none: no scores by position"):
        config_of(replace(header, settings=settings), lambda name: None)
    settings = {**header.settings, "deepseek2.attention.key_length_mla": 16}
    with pytest.raises(CheckpointError, match=r"key_length_mla is 16; allowed: more than the 16 that rotate"):
        config_of(replace(header, settings=settings), lambda name: None)


def mxfp4_experts(folder: Path, scale: int = 120) -> dict[str, tuple[str, Any]]:
    """Return random blocks of MXFP4 for the experts of a model, and write what they stand for into its folder."""
    tensors = {name: np.array(each) for name, each in load_file(folder / "model.safetensors").items()}
    experts = sorted(name for name in tensors if ".experts." in name and name.endswith(".weight"))
    random, blocks = np.random.default_rng(0), {}
    for name in experts:
        out, inputs = tensors[name].shape
        each = random.integers(0, 256, (out, inputs // 32, 17), np.uint8)
        each[..., 0] = random.integers(scale - 3, scale + 3, each.shape[:2])
        tensors[name] = BLOCK_TYPES[39].widen(each.reshape(-1, 17)).reshape(out, inputs)
        stacked = f"{name.partition('.experts.')[0]}.experts.{name.rpartition('.experts.')[2].partition('.')[2]}"
        kind, before = blocks.get(stacked, ("MXFP4", []))
        blocks[stacked] = kind, [*before, each.reshape(out, -1)]
    save_file(tensors, folder / "model.safetensors")
    return {name: (kind, np.stack(each)) for name, (kind, each) in blocks.items()}


def test_experts_of_mxfp4_stay_packed(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    folder = golden("gpt-oss", tmp_path / "model", sizes)
    path = write_gguf(folder, tmp_path / "m.gguf", blocks=mxfp4_experts(folder))
    source = GgufFile(path)
    assert set(source.block_types().values()) == {"MXFP4"}
    assert answer_of(path, "float32", "widened") == answer_of(folder, "float32")
    packed, widened = logits_of(path), logits_of(path, weights="widened")
    assert 0 < np.std(packed - widened) < 0.05 * np.std(widened)


def test_scales_of_mxfp4_that_no_packed_block_has_are_refused_by_the_name_of_the_tensor(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 32}
    folder = golden("gpt-oss", tmp_path / "model", sizes)
    path = write_gguf(folder, tmp_path / "m.gguf", blocks=mxfp4_experts(folder, scale=60))
    said = r"m\.gguf: tensor 'blk\.0\.ffn_\w+_exps\.weight' is .*allowed: from 2\^-23 to 2\^16, or the option --weights"
    with pytest.raises(CheckpointError, match=said):
        answer_of(path, "float32")
    assert answer_of(path, "float32", "widened") == answer_of(folder, "float32")
