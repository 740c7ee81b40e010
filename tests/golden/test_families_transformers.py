"""Families against transformers: the logits of every position, and greedy text.

Twice: with transformers where it is installed, and against logits that it gave once
(`scripts/make_goldens.py`), so that every machine compares with it. A family that has no module yet
has its spec here: what is compared then is what a spec can say, and the decoder that interprets it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.models import FAMILIES, read_model
from quire.compute.models.base import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    ExpertsSpec,
    LayerSpec,
    MLPSpec,
    NormKind,
    NormSpec,
    Part,
    WeightSource,
)
from quire.compute.models.common import LAYER, head_dim, llama_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import rope_spec
from quire.compute.native import NativeSettings
from support.native_runs import FLOAT32, NativeRun
from support.reference_runs import ReferenceRun
from support.tiny_checkpoint import write_tiny_llama

DATA = Path(__file__).parent / "data" / "families"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
HEAD_NORMS = {Part.QUERY_NORM: LAYER + "self_attn.q_norm", Part.KEY_NORM: LAYER + "self_attn.k_norm"}
OPT: Mapping[Part, str] = {
    Part.EMBEDDING: "model.decoder.embed_tokens",
    Part.EMBEDDING_IN: "model.decoder.project_in",
    Part.EMBEDDING_OUT: "model.decoder.project_out",
    Part.POSITIONS: "model.decoder.embed_positions",
    Part.QUERY: "model.decoder.layers.{layer}.self_attn.q_proj",
    Part.KEY: "model.decoder.layers.{layer}.self_attn.k_proj",
    Part.VALUE: "model.decoder.layers.{layer}.self_attn.v_proj",
    Part.OUTPUT: "model.decoder.layers.{layer}.self_attn.out_proj",
    Part.ATTENTION_NORM: "model.decoder.layers.{layer}.self_attn_layer_norm",
    Part.JOINED_ATTENTION_NORM: "model.decoder.layers.{layer}.self_attn_layer_norm",
    Part.UP: "model.decoder.layers.{layer}.fc1",
    Part.DOWN: "model.decoder.layers.{layer}.fc2",
    Part.MLP_NORM: "model.decoder.layers.{layer}.final_layer_norm",
    Part.JOINED_MLP_NORM: "model.decoder.layers.{layer}.final_layer_norm",
    Part.FINAL_NORM: "model.decoder.final_layer_norm",
}


def llama_like(config: ConfigFile) -> DecoderSpec:
    """Return what Llama's descendants begin with."""
    size = head_dim(config)
    layer = LayerSpec(None, rope_spec(config, size, layer_type="full_attention"))
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        context_length=config.size("max_position_embeddings"),
        norm=NormSpec(NormKind.RMS, config.number("rms_norm_eps")),
        attention=AttentionSpec(
            num_heads=config.size("num_attention_heads"),
            num_kv_heads=config.size("num_key_value_heads"),
            head_dim=size,
            scale=size**-0.5,
        ),
        mlp=MLPSpec(config.size("intermediate_size"), Activation.SILU),
        layers=(layer,) * config.size("num_hidden_layers"),
        sources=llama_sources(),
        tied_head=config.flag("tie_word_embeddings", False),
    )


def mistral(config: ConfigFile) -> DecoderSpec:
    spec = llama_like(config)
    return replace(spec, layers=tuple(replace(layer, window=config.size("sliding_window")) for layer in spec.layers))


def qwen2(config: ConfigFile) -> DecoderSpec:
    spec = llama_like(config)
    return replace(spec, attention=replace(spec.attention, bias=True))


def qwen3_moe(config: ConfigFile) -> DecoderSpec:
    spec = llama_like(config)
    dense: Any = config.fields.get("mlp_only_layers") or ()
    stem = LAYER + "mlp.experts.{expert}."
    experts = {
        Part.ROUTER: LAYER + "mlp.gate",
        Part.EXPERT_GATE: stem + "gate_proj",
        Part.EXPERT_UP: stem + "up_proj",
        Part.EXPERT_DOWN: stem + "down_proj",
    }
    return replace(
        spec,
        attention=replace(spec.attention, qk_norm=spec.norm),
        experts=ExpertsSpec(
            num_experts=config.size("num_local_experts"),
            experts_per_token=config.size("num_experts_per_tok"),
            intermediate_size=config.size("moe_intermediate_size"),
            normalize_weights=config.flag("norm_topk_prob", False),
        ),
        layers=tuple(replace(layer, sparse=index not in dense) for index, layer in enumerate(spec.layers)),
        sources=llama_sources(HEAD_NORMS | experts),
    )


def gemma2(config: ConfigFile) -> DecoderSpec:
    spec = llama_like(config)
    soft_cap = config.number("attn_logit_softcapping") if config.is_set("attn_logit_softcapping") else None
    final_cap = config.number("final_logit_softcapping") if config.is_set("final_logit_softcapping") else None
    norms = {
        Part.AFTER_ATTENTION_NORM: LAYER + "post_attention_layernorm",
        Part.MLP_NORM: LAYER + "pre_feedforward_layernorm",
        Part.AFTER_MLP_NORM: LAYER + "post_feedforward_layernorm",
    }
    size, windows = (
        spec.attention.head_dim,
        {"full_attention": None, "sliding_attention": config.size("sliding_window")},
    )
    return replace(
        spec,
        norm=replace(spec.norm, unit_offset=True),
        norm_after=True,
        attention=replace(
            spec.attention, scale=config.number("query_pre_attn_scalar") ** -0.5, score_soft_cap=soft_cap
        ),
        mlp=replace(spec.mlp, activation=Activation.GELU_TANH),
        layers=tuple(
            LayerSpec(windows[kind], rope_spec(config, size, layer_type=kind)) for kind in config.texts("layer_types")
        ),
        sources=llama_sources(HEAD_NORMS | norms),
        tied_head=True,
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=final_cap,
    )


def gemma3(config: ConfigFile) -> DecoderSpec:
    spec = gemma2(config)
    return replace(spec, attention=replace(spec.attention, qk_norm=spec.norm))


def phi3(config: ConfigFile) -> DecoderSpec:
    spec = llama_like(config)
    query = spec.attention.num_heads * spec.attention.head_dim
    key = query + spec.attention.num_kv_heads * spec.attention.head_dim
    qkv, gate_up = LAYER + "self_attn.qkv_proj", LAYER + "mlp.gate_up_proj"
    fused = {
        Part.QUERY: WeightSource(qkv),
        Part.KEY: WeightSource(qkv, first_row=query),
        Part.VALUE: WeightSource(qkv, first_row=key),
        Part.GATE: WeightSource(gate_up),
        Part.UP: WeightSource(gate_up, first_row=spec.mlp.intermediate_size),
    }
    return replace(spec, sources={**spec.sources, **fused})


def gpt2(config: ConfigFile) -> DecoderSpec:
    hidden, heads, layer = config.size("n_embd"), config.size("n_head"), "transformer.h.{layer}."
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        context_length=config.size("n_positions"),
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_epsilon")),
        attention=AttentionSpec(heads, heads, hidden // heads, (hidden // heads) ** -0.5, bias=True, output_bias=True),
        mlp=MLPSpec(4 * hidden, Activation.GELU_TANH, gated=False, bias=True),
        layers=(LayerSpec(None, None),) * config.size("n_layer"),
        sources={
            Part.EMBEDDING: WeightSource("transformer.wte"),
            Part.POSITIONS: WeightSource("transformer.wpe"),
            Part.ATTENTION_NORM: WeightSource(layer + "ln_1"),
            Part.QUERY: WeightSource(layer + "attn.c_attn", transposed=True),
            Part.KEY: WeightSource(layer + "attn.c_attn", first_row=hidden, transposed=True),
            Part.VALUE: WeightSource(layer + "attn.c_attn", first_row=2 * hidden, transposed=True),
            Part.OUTPUT: WeightSource(layer + "attn.c_proj", transposed=True),
            Part.MLP_NORM: WeightSource(layer + "ln_2"),
            Part.UP: WeightSource(layer + "mlp.c_fc", transposed=True),
            Part.DOWN: WeightSource(layer + "mlp.c_proj", transposed=True),
            Part.FINAL_NORM: WeightSource("transformer.ln_f"),
        },
        optional_prefix="transformer.",
        tied_head=True,
        learned_positions=0,
    )


def opt(config: ConfigFile) -> DecoderSpec:
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    before, row = config.flag("do_layer_norm_before", True), config.size("word_embed_proj_dim", hidden)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        context_length=config.size("max_position_embeddings"),
        norm=NormSpec(NormKind.LAYER, 1e-5),
        attention=AttentionSpec(heads, heads, hidden // heads, (hidden // heads) ** -0.5, bias=True, output_bias=True),
        mlp=MLPSpec(config.size("ffn_dim"), Activation.RELU, gated=False, bias=True),
        layers=(LayerSpec(None, None),) * config.size("num_hidden_layers"),
        sources={part: WeightSource(stem) for part, stem in OPT.items()},
        tied_head=True,
        norm_before=before,
        norm_joined=not before,
        final_norm=before,
        embedding_size=None if row == hidden else row,
        learned_positions=2,
    )


SPECS: dict[str, Callable[[ConfigFile], DecoderSpec]] = {
    "MistralForCausalLM": mistral,
    "Qwen2ForCausalLM": qwen2,
    "Qwen3MoeForCausalLM": qwen3_moe,
    "Gemma2ForCausalLM": gemma2,
    "Gemma3ForCausalLM": gemma3,
    "Phi3ForCausalLM": phi3,
    "GPT2LMHeadModel": gpt2,
    "OPTForCausalLM": opt,
}


# The compiled core on each instruction set that this machine has.
ENGINES: dict[str, Callable[..., ReferenceRun]] = {"reference": ReferenceRun} | {
    name: partial(NativeRun, settings=replace(FLOAT32, instruction_set=name, num_threads=2))
    for name in _native.kernel_names()
}
each_engine = pytest.mark.parametrize("engine", ENGINES)


def spec_of(folder: Path, max_length: int) -> DecoderSpec:
    """Return the spec of a folder: by its family's module, or by one of the functions above."""
    config = ConfigFile.read(folder / "config.json")
    architecture = config.texts("architectures")[0]
    return read_model(folder, max_length).spec if architecture in FAMILIES else SPECS[architecture](config)


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """|Δ| ≤ 1e-4 × max(1, max |logit|), at every position and token."""
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, float(np.abs(theirs).max()))


@each_engine
@pytest.mark.parametrize("name", CASES["forms"])
def test_logits_and_text_are_those_that_transformers_gave(name: str, engine: str, tmp_path: Path) -> None:
    form, tokens = CASES["forms"][name], CASES["tokens"]
    (tmp_path / "config.json").write_text(json.dumps(form["config"]))
    shutil.copy(DATA / form["weights"], tmp_path / "model.safetensors")
    run = ENGINES[engine](tmp_path, spec=spec_of(tmp_path, len(tokens)))
    text = [run.prefill(0, tokens, chunks=[10, 60])]
    text += run.decode(0, len(tokens), len(form["greedy"]) - 1)
    assert text[: len(form["greedy"])] == form["greedy"]
    for position, logits in form["logits"].items():
        assert_close(run.logits[0, int(position)], np.array(logits, np.float32))
    assert [int(run.logits[0, position].argmax()) for position in range(len(tokens))] == form["best"]


FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie": True},
    "sharded": {"num_shards": 3},
    "bfloat16": {"dtype": "BF16", "num_shards": 2},
    "float16": {"dtype": "F16", "tie": True},
    "biases": {"settings": {"attention_bias": True, "mlp_bias": True}},
    "llama-2": {"settings": {"num_key_value_heads": 4, "head_dim": 16}},
}


@pytest.mark.torch
@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_reads_our_folders_as_we_do(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support import transformers_models

    write_tiny_llama(tmp_path, **FOLDERS[name])
    tokens = [(7 * i * i + 3 * i) % 128 for i in range(150)]
    run = ReferenceRun(tmp_path)
    run.prefill(0, tokens)
    ours = np.stack([run.logits[0, position] for position in range(len(tokens))])
    theirs = transformers_models.all_logits(transformers_models.load(tmp_path), tokens)
    assert_close(ours, theirs)
    assert np.array_equal(ours.argmax(1), theirs.argmax(1))


@pytest.mark.torch
@each_engine
@pytest.mark.parametrize("name", CASES["forms"])
def test_logits_of_all_positions_are_those_of_transformers(name: str, engine: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support import transformers_models

    model = transformers_models.small_model(name)
    transformers_models.save(model, tmp_path)
    tokens = [(7 * i * i + 3 * i) % 64 for i in range(150)]
    run = ENGINES[engine](tmp_path, spec=spec_of(tmp_path, len(tokens)))
    run.prefill(0, tokens)
    ours = np.stack([run.logits[0, position] for position in range(len(tokens))])
    assert_close(ours, transformers_models.all_logits(model, tokens))


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES["forms"])
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(name: str, tmp_path: Path) -> None:
    """Mean KL divergence and the 99th percentile of |Δ log-probability|: at most 1.1 times theirs."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from support import transformers_models

    model = transformers_models.small_model(name)
    transformers_models.save(model, tmp_path)
    tokens = [(7 * i * i + 3 * i) % 64 for i in range(150)]
    exact = log_softmax(transformers_models.all_logits(model, tokens))
    theirs = log_softmax(transformers_models.all_logits(model.bfloat16(), tokens))
    settings = NativeSettings(dtype="bfloat16", max_num_batched_tokens=256)
    run = NativeRun(tmp_path, spec=spec_of(tmp_path, len(tokens)), settings=settings)
    run.prefill(0, tokens, chunks=[10, 60])
    ours = log_softmax(np.stack([run.logits[0, position] for position in range(len(tokens))]))
    for distance in (mean_divergence, largest_difference):
        assert distance(exact, ours) <= 1.1 * distance(exact, theirs)


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    moved = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    exact: NDArray[np.float64] = moved - np.log(np.exp(moved).sum(axis=1, keepdims=True))
    return exact


def mean_divergence(exact: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float((np.exp(exact) * (exact - other)).sum(axis=1).mean())


def largest_difference(exact: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    return float(np.percentile(np.abs(exact - other), 99))
