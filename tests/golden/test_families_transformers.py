"""Families against transformers: the logits of every position, and greedy text.

Twice: with transformers where it is installed, and against logits that it gave once
(`scripts/make_goldens.py`), so that every machine compares with it.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.compute.native import NativeSettings
from quire.compute.weights.checkpoint import Checkpoint
from support.native_runs import FLOAT32, NativeRun
from support.reference_runs import ReferenceRun
from support.tiny_checkpoint import write_model_weights, write_tiny_llama

DATA = Path(__file__).parent / "data" / "families"
CASES: dict[str, Any] = json.loads((DATA / "cases.json").read_text())
# The compiled core on each instruction set that this machine has.
ENGINES: dict[str, Callable[..., ReferenceRun]] = {"reference": ReferenceRun} | {
    name: partial(NativeRun, settings=replace(FLOAT32, instruction_set=name, num_threads=2))
    for name in _native.kernel_names()
}
each_engine = pytest.mark.parametrize("engine", ENGINES)


def engine_cases() -> list[Any]:
    """Every form with every engine. The instruction sets between the plain one and the widest take turns."""
    cases, widest = [], len(ENGINES) - 1
    for number, form in enumerate(CASES["forms"]):
        for place, engine in enumerate(ENGINES):
            is_short = place in (0, widest, 1 + number % max(1, widest - 1))
            cases.append(pytest.param(form, engine, marks=() if is_short else pytest.mark.long))
    return cases


def assert_close(ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> None:
    """|Δ| ≤ 1e-4 × max(1, max |logit|), at every position and token."""
    assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, float(np.abs(theirs).max()))


@pytest.mark.parametrize(("name", "engine"), engine_cases())
def test_logits_and_text_are_those_that_transformers_gave(name: str, engine: str, tmp_path: Path) -> None:
    form, tokens = CASES["forms"][name], CASES["tokens"]
    (tmp_path / "config.json").write_text(json.dumps(form["config"]))
    shutil.copy(DATA / form["weights"], tmp_path / "model.safetensors")
    run = ENGINES[engine](tmp_path, spec=read_model(ModelFolder(tmp_path), len(tokens)).spec)
    text = [run.prefill(0, tokens, chunks=[10, 60])]
    text += run.decode(0, len(tokens), len(form["greedy"]) - 1)
    assert text[: len(form["greedy"])] == form["greedy"]
    for position, logits in form["logits"].items():
        assert_close(run.logits[0, int(position)], np.array(logits, np.float32))
    assert [int(run.logits[0, position].argmax()) for position in range(len(tokens))] == form["best"]


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("opt", "model.")])
def test_a_checkpoint_of_the_bare_model_is_the_same_model(name: str, prefix: str, tmp_path: Path) -> None:
    """GPT-2 was published without the prefix, and with the causal mask of each layer."""
    form, tokens = CASES["forms"][name], CASES["tokens"]
    (tmp_path / "config.json").write_text(json.dumps(form["config"]))
    shutil.copy(DATA / form["weights"], tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    bare = {key.removeprefix(prefix): np.array(checkpoint.tensor(key)) for key in checkpoint.entries}
    if name == "gpt2":
        bare |= {f"h.{layer}.attn.bias": np.tri(256, dtype=np.float32)[None, None] for layer in range(2)}
    write_model_weights(tmp_path, bare)
    run = ReferenceRun(tmp_path)
    run.prefill(0, tokens)
    for position, logits in form["logits"].items():
        assert_close(run.logits[0, int(position)], np.array(logits, np.float32))


FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie": True},
    "sharded": {"num_shards": 3},
    "bfloat16": {"dtype": "BF16", "num_shards": 2},
    "float16": {"dtype": "F16", "tie": True},
    "biases": {"settings": {"attention_bias": True, "mlp_bias": True}},
    "llama-2": {"settings": {"num_key_value_heads": 4, "head_dim": 16}},
}


@pytest.mark.transformers
@pytest.mark.parametrize("name", FOLDERS)
def test_transformers_reads_our_folders_as_we_do(name: str, tmp_path: Path) -> None:
    from support import transformers_models

    write_tiny_llama(tmp_path, **FOLDERS[name])
    tokens = [(7 * i * i + 3 * i) % 128 for i in range(150)]
    run = ReferenceRun(tmp_path)
    run.prefill(0, tokens)
    ours = np.stack([run.logits[0, position] for position in range(len(tokens))])
    theirs = transformers_models.all_logits(transformers_models.load(tmp_path), tokens)
    assert_close(ours, theirs)
    assert np.array_equal(ours.argmax(1), theirs.argmax(1))


@dataclass(frozen=True)
class Made:
    """A small model of transformers, the folder that transformers has written, and the logits of a text."""

    model: Any
    folder: Path
    spec: DecoderSpec
    logits: NDArray[np.float32]

    @classmethod
    def of(cls, folder: Path, form: str, **changes: Any) -> Made:
        from support import transformers_models

        model = transformers_models.small_model(form, **changes)
        transformers_models.save(model, folder)
        spec = read_model(ModelFolder(folder), len(TEXT)).spec
        return cls(model, folder, spec, transformers_models.all_logits(model, TEXT))

    def compare(self, engine: str) -> None:
        run = ENGINES[engine](self.folder, spec=self.spec)
        run.prefill(0, TEXT)
        assert_close(np.stack([run.logits[0, position] for position in range(len(TEXT))]), self.logits)


TEXT = [(7 * i * i + 3 * i) % 64 for i in range(150)]


@pytest.fixture(scope="module", params=CASES["forms"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made.of(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.transformers
@each_engine
def test_logits_of_all_positions_are_those_of_transformers(family: Made, engine: str) -> None:
    family.compare(engine)


NEAR, FAR = "sliding_attention", "full_attention"
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-far": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "ministral-near": ("ministral", {"layer_types": None, "tie_word_embeddings": True}),
    "mixtral-near": ("mixtral", {"sliding_window": 24, "head_dim": 16, "num_experts_per_tok": 3}),
    "mixtral-tied": ("mixtral", {"rope_parameters": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}),
    "arcee-biases": (
        "arcee",
        {"rope_parameters": None, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "exaone-biases": (
        "exaone",
        {"rope_parameters": None, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "exaone4-far": (
        "exaone4",
        {
            **{"sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 10_000.0, "factor": 4.0, "low_freq_factor": 1.0},
                **{"high_freq_factor": 4.0, "original_max_position_embeddings": 64},
            },
        },
    ),
    "exaone4-every-other": (
        "exaone4",
        {"layer_types": None, "num_hidden_layers": 5, "sliding_window_pattern": 2, "rms_norm_eps": 1e-6},
    ),
    "jais2-plain": (
        "jais2",
        {"attention_bias": False, "mlp_bias": False, "layer_norm_eps": 1e-3, "tie_word_embeddings": True},
    ),
    "hunyuan-biases": (
        "hunyuan",
        {"rope_parameters": None, "attention_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4},
    ),
    "qwen2-near": ("qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen2-moe-near": (
        "qwen2-moe",
        {
            **{"use_sliding_window": True, "sliding_window": 24, "layer_types": [NEAR, FAR, NEAR], "qkv_bias": False},
            **{"norm_topk_prob": True, "tie_word_embeddings": True, "mlp_only_layers": [], "decoder_sparse_step": 2},
        },
    ),
    "qwen3-moe-every-other": ("qwen3-moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "attention_bias": True}),
    "qwen3-moe-near": ("qwen3-moe", {"use_sliding_window": True, "sliding_window": 24, "tie_word_embeddings": True}),
    "mellum-far": (
        "mellum",
        {
            **{"layer_types": None, "mlp_layer_types": None, "rope_parameters": None, "norm_topk_prob": False},
            **{"sliding_window": None, "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "gemma-first": ("gemma", {"hidden_act": "gelu", "attention_bias": True, "num_key_value_heads": 1}),
    "gemma2-plain": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": [FAR, NEAR]},
    ),
    "gemma3-cap": ("gemma3", {"final_logit_softcapping": 3.0, "attention_bias": True}),
    "gemma3-pattern": ("gemma3", {"num_hidden_layers": 6, "layer_types": None, "rope_parameters": None}),
    "phi3-near": ("phi3", {"sliding_window": 24, "tie_word_embeddings": True, "rope_parameters": None}),
    "phimoe-near": (
        "phimoe",
        {
            **{"sliding_window": 24, "attention_bias": False, "lm_head_bias": False, "router_jitter_noise": 0.01},
            **{"num_local_experts": 9, "rope_parameters": None, "tie_word_embeddings": True},
        },
    ),
    "phimoe-long": (  # transformers has the long scale with the short factors
        "phimoe",
        {
            **{"num_local_experts": 2, "num_key_value_heads": 4},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 64},
                **{"short_factor": [1.0, 2.0, 3.0, 4.0], "long_factor": [1.0, 2.0, 3.0, 4.0]},
                **{"short_mscale": 1.1, "long_mscale": 1.3},
            },
        },
    ),
    "gpt2-wide": ("gpt2", {"n_inner": 40, "scale_attn_weights": False, "tie_word_embeddings": False}),
    "opt-bare": ("opt", {"enable_bias": False, "tie_word_embeddings": False, "activation_function": "gelu"}),
    "opt-350m-untied": ("opt-350m", {"tie_word_embeddings": False}),
    "opt-no-final-norm": ("opt", {"_remove_final_layer_norm": True}),
    "ernie4-5-biases": ("ernie4-5", {"use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4}),
    "ernie4-5-moe-biases": (
        "ernie4-5-moe",
        {
            **{"use_bias": True, "tie_word_embeddings": False, "num_key_value_heads": 4, "moe_num_shared_experts": 1},
            **{"moe_layer_start_index": 0, "moe_layer_end_index": -1, "moe_layer_interval": 2, "moe_k": 2},
        },
    ),
    "ernie4-5-moe-alone": ("ernie4-5-moe", {"moe_num_shared_experts": 0, "moe_layer_start_index": 2, "moe_k": 4}),
    "seed-oss-biases": (
        "seed-oss",
        {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "smollm3-listed": (
        "smollm3",
        {"no_rope_layers": [1, 0, 0, 1], "use_sliding_window": False, "attention_bias": True, "mlp_bias": True},
    ),
    "olmo2-biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    "olmoe-normalised": (
        "olmoe",
        {"norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "olmo3-pattern": ("olmo3", {"num_hidden_layers": 5, "layer_types": None, "rope_parameters": None}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "hyperclovax-plain": (
        "hyperclovax",
        {
            **{"use_post_norm": False, "attention_multiplier": None, "head_dim": 16, "tie_word_embeddings": True},
            **{"attention_bias": True, "mlp_bias": True},
        },
    ),
    "granite-moe-swa-pattern": (
        "granite-moe-swa",
        {
            **{"num_hidden_layers": 5, "layer_types": None, "layer_rope_theta": None, "tie_word_embeddings": False},
            **{"shared_intermediate_size": 0, "attention_bias": True},
        },
    ),
    "granite-moe-shared-tied": (
        "granite-moe-shared",
        {"tie_word_embeddings": True, "num_experts_per_tok": 3, "hidden_act": "gelu", "rms_norm_eps": 1e-5},
    ),
    "granite-hybrid-sparse": (
        "granite-hybrid",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "granite-hybrid-without-positions": (
        "granite-hybrid",
        {"position_embedding_type": None, "tie_word_embeddings": True, "shared_intermediate_size": 40},
    ),
    "granite4-h-experts": (
        "granite4-h",
        {
            **{"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
            **{"mamba_n_groups": 1, "mamba_conv_bias": False, "position_embedding_type": "rope"},
        },
    ),
    "nemotron-h-dense": (
        "nemotron-h",
        {"layers_block_type": ["mlp", FAR, "linear_attention"], "use_conv_bias": False},
    ),
    "granite-moe-tied": (
        "granite-moe",
        {"attention_bias": True, "tie_word_embeddings": True, "num_experts_per_tok": 3, "num_local_experts": 7},
    ),
    "glm4-whole": (
        "glm4",
        {"attention_bias": False, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
    ),
    "cohere-plain": ("cohere", {"use_qk_norm": False, "attention_bias": True, "logit_scale": 0.8}),
    "deepseek-v2-biases": ("deepseek-v2-lite", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "deepseek-v3-halves": ("deepseek-v3", {"rope_interleave": False, "n_group": 1, "topk_group": 1}),
    "deepseek-v3-whole": ("deepseek-v3", {"q_lora_rank": None, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    "glm4-moe-groups": (
        "glm4-moe",
        {
            **{"n_group": 3, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 0},
            **{"norm_topk_prob": False, "use_qk_norm": False, "attention_bias": False, "tie_word_embeddings": True},
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    ),
    "minicpm3-whole": ("minicpm3", {"q_lora_rank": None, "attention_bias": True, "mlp_bias": True, "v_head_dim": 32}),
    "cohere2-pattern": ("cohere2", {"num_hidden_layers": 5, "layer_types": None}),
    "cohere2-moe-rms": (
        "cohere2-moe",
        {
            **{"rms_norm_eps": 1e-6, "expert_selection_fn": "softmax", "shared_expert_combination_strategy": "sum"},
            **{"layer_types": [NEAR, FAR, FAR, NEAR], "mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
            **{"prefix_dense_sliding_window_pattern": 2, "attention_bias": True, "tie_word_embeddings": False},
        },
    ),
    "cohere2-moe-raw": ("cohere2-moe", {"num_shared_experts": 0, "norm_topk_prob": False, "num_experts_per_tok": 2}),
    "starcoder2-far": ("starcoder2", {"use_bias": False, "sliding_window": None, "tie_word_embeddings": False}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "stablelm-12b": ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    "falcon-7b": ("falcon", {"new_decoder_architecture": False, "bias": True}),
    "falcon-11b": ("falcon", {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 40, "tie_word_embeddings": False}),
    "falcon-in-turn": (
        "falcon",
        {"new_decoder_architecture": False, "parallel_attn": False, "multi_query": False, "num_kv_heads": 4},
    ),
    "gpt-neox-in-turn": ("gpt-neox", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    "gpt-oss-plain": (
        "gpt-oss",
        {"rope_parameters": {"rope_theta": 1e4}, "layer_types": [FAR, NEAR], "tie_word_embeddings": True},
    ),
    "gpt-oss-pattern": ("gpt-oss", {"num_hidden_layers": 3, "layer_types": None, "num_experts_per_tok": 2}),
    "phi-gqa": ("phi", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}}),
    "gemma3-eye": ("gemma3-eye", {}),
    "internvl-eye": ("internvl-eye", {}),
    "gemma4-eye": ("gemma4-eye", {}),
    "llama4-eye": ("llama4-eye", {}),
    "llama4-plain": (
        "llama4",
        {
            **{"no_rope_layers": [1, 1, 0, 1], "attention_bias": True, "attn_temperature_tuning": False},
            **{"attention_chunk_size": 70, "num_experts_per_tok": 1, "tie_word_embeddings": True},
        },
    ),
    "mamba2-tied": ("mamba2", {"n_groups": 1, "use_conv_bias": False, "tie_word_embeddings": True}),
    "olmo-hybrid-turning": (
        "olmo-hybrid",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "linear_allow_neg_eigval": False},
    ),
    "lfm2-plain": (
        "lfm2",
        {
            **{"block_auto_adjust_ff_dim": False, "conv_L_cache": 4, "tie_word_embeddings": False, "norm_eps": 1e-6},
            **{"layer_types": None, "full_attn_idxs": [0, 3]},
        },
    ),
    "lfm2-moe-raw": (
        "lfm2-moe",
        {"norm_topk_prob": False, "use_expert_bias": False, "num_dense_layers": 0, "layer_types": ["conv"] * 2 + [FAR]},
    ),
    "lfm3-plain": (
        "lfm3",
        {
            **{"use_sandwich_norm": False, "use_attention_gate": False, "conv_L_cache": 3, "norm_eps": 1e-6},
            **{"layer_types": [NEAR, "conv", FAR], "num_hidden_layers": 3, "tie_word_embeddings": False},
            "rope_parameters": None,
        },
    ),
    "gemma4-unified-eye": ("gemma4-unified-eye", {}),
    "gemma4-pattern": (
        "gemma4",
        {
            **{"num_hidden_layers": 8, "layer_types": None, "num_kv_shared_layers": 1, "use_double_wide_mlp": False},
            **{"rope_parameters": None, "attention_bias": True, "final_logit_softcapping": None},
        },
    ),
    "gemma4-moe-biases": (
        "gemma4-moe",
        {
            **{"attention_bias": True, "top_k_experts": 3, "moe_intermediate_size": 16, "num_kv_shared_layers": 1},
            **{"layer_types": [FAR, NEAR, FAR], "attention_k_eq_v": False, "hidden_size_per_layer_input": 16},
            "vocab_size_per_layer_input": 64,
        },
    ),
    "gemma4-untied": ("gemma4-keys", {"tie_word_embeddings": False, "num_global_key_value_heads": None}),
    "gemma3n-plain": (
        "gemma3n",
        {
            **{"altup_correct_scale": False, "activation_sparsity_pattern": None, "intermediate_size": 40},
            **{"layer_types": None, "num_hidden_layers": 6, "num_kv_shared_layers": 0, "rope_parameters": None},
            **{"attention_bias": True, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
        },
    ),
    "ministral3-far": (
        "ministral3",
        {"sliding_window": 24, "tie_word_embeddings": True, "rope_parameters": None, "max_position_embeddings": 262144},
    ),
    "ministral3-eye": ("ministral3-eye", {}),
    "mistral-eye": ("mistral-eye", {}),
    "qwen2-vl": ("qwen2-vl", {}),
    "qwen2.5-vl": ("qwen2.5-vl", {}),
    "qwen3-vl": ("qwen3-vl", {}),
    "qwen3-5-eye": ("qwen3-5-eye", {}),
    "qwen3-5-moe-eye": ("qwen3-5-moe-eye", {}),
    "qwen3-5-every-other": (
        "qwen3-5",
        {
            **{"layer_types": None, "full_attention_interval": 2, "attention_bias": True, "tie_word_embeddings": True},
            **{"linear_conv_kernel_dim": 2, "linear_num_value_heads": 2, "partial_rotary_factor": 1.0},
        },
    ),
    "qwen3-next-dense": (
        "qwen3-next",
        {"mlp_only_layers": [0, 1, 2], "norm_topk_prob": False, "linear_num_value_heads": 6, "rms_norm_eps": 1e-5},
    ),
    "qwen3-vl-tied": ("qwen3-vl", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3-vl-moe": ("qwen3-vl-moe", {}),
    "qwen3-vl-moe-every-other": (
        "qwen3-vl-moe",
        {"decoder_sparse_step": 2, "mlp_only_layers": [], "attention_bias": True, "moe_intermediate_size": 16},
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    form, changes = VARIANTS[request.param]
    return Made.of(tmp_path_factory.mktemp(request.param), form, **changes)


@pytest.mark.transformers
@pytest.mark.parametrize("engine", ["reference", _native.kernel_names()[-1]])
def test_other_settings_of_a_family_are_read_as_transformers_reads_them(variant: Made, engine: str) -> None:
    variant.compare(engine)


@pytest.mark.transformers
@each_engine
def test_gates_and_ups_beyond_the_clamps_of_gpt_oss(engine: str, tmp_path: Path) -> None:
    import torch

    from support import transformers_models

    model = transformers_models.small_model("gpt-oss")
    for layer in model.model.layers:
        layer.mlp.experts.gate_up_proj.mul_(16)
    shares = []
    for experts in (layer.mlp.experts for layer in model.model.layers):

        def gate(both: torch.Tensor, plain: Any = experts._apply_gate) -> Any:
            shares.append(float((both.abs() > 7).float().mean()))
            return plain(both)

        experts._apply_gate = gate
    transformers_models.save(model, tmp_path)
    tokens = [(7 * i * i + 3 * i) % 64 for i in range(150)]
    theirs = transformers_models.all_logits(model, tokens)
    assert min(shares) > 0.2
    run = ENGINES[engine](tmp_path)
    run.prefill(0, tokens)
    assert_close(np.stack([run.logits[0, position] for position in range(len(tokens))]), theirs)


@pytest.mark.transformers
def test_bfloat16_is_as_close_to_float32_as_that_of_transformers(family: Made) -> None:
    """Mean KL divergence and the 99th percentile of |Δ log-probability|: at most 1.1 times theirs.

    Families with experts get more texts: where two experts are nearly as likely, any rounding may choose the other one,
    and a few such tokens would decide about one text.
    """
    import torch

    number = 48 if family.spec.experts else 1
    texts = [[(7 * i * i + 3 * i + 5 * n * (i + 1)) % 64 for i in range(150)] for n in range(number)]
    settings = NativeSettings(dtype="bfloat16", max_num_batched_tokens=256)
    run = NativeRun(family.folder, spec=family.spec, settings=settings, num_blocks=64 * number)
    for row, text in enumerate(texts):
        run.prefill(row, text, chunks=[10, 60])
    ours = log_softmax(np.stack([run.logits[row, position] for row in range(number) for position in range(150)]))

    def log_shares(model: Any) -> NDArray[np.float64]:
        with torch.no_grad():
            logits = model(torch.tensor(texts), use_cache=False).logits
        return log_softmax(logits.float().numpy().reshape(-1, logits.shape[-1]))

    exact, theirs = log_shares(family.model), log_shares(copy.deepcopy(family.model).bfloat16())
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
