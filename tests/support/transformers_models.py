"""Tiny models made and run by transformers (which it needs): the witness of ours."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

torch.set_num_threads(1)  # tests run side by side, and these models are tiny

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 63,
    "pad_token_id": 0,
}
LLAMA = ("Llama", {**SIZES, "head_dim": 16})
SMOOTH = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 0.7 * i for i in range(8)]}
MOE = {**SIZES, "head_dim": 16, "moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "partial_rotary_factor": 0.25,
}
NEAR, FAR = "sliding_attention", "full_attention"
WIDE = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 24}
DEEPSEEK = {
    **SIZES,
    **{"num_hidden_layers": 3, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    **{"kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 16, "v_head_dim": 16},
    **{"moe_intermediate_size": 24, "n_routed_experts": 6, "n_shared_experts": 2},
    "rope_parameters": {
        **{"rope_type": "yarn", "rope_theta": 10_000.0, "mscale": 0.707, "mscale_all_dim": 0.8},
        **{"factor": 4.0, "original_max_position_embeddings": 64},
    },
}


def _llama(rope: dict[str, Any], **settings: Any) -> tuple[str, dict[str, Any]]:
    rope = {"rope_theta": 10_000.0, **rope}
    return LLAMA[0], {**LLAMA[1], "rope_parameters": rope, **settings}


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": LLAMA,
    "llama-tied": _llama({}, tie_word_embeddings=True),
    "llama-2": ("Llama", {**SIZES, "num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-3": _llama({"rope_type": "llama3", **STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "llama-linear": _llama({"rope_type": "linear", "factor": 4.0}),
    "llama-yarn": _llama({"rope_type": "yarn", **STRETCHED}),
    "llama-longrope": _llama({"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 64}),
    "llama-dynamic": _llama({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=64),
    "apertus": (
        "Apertus",
        {**SIZES, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, **STRETCHED, **SMOOTH}},
    ),
    "arcee": (
        "Arcee",
        {**SIZES, "head_dim": 16, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, **STRETCHED}},
    ),
    "exaone": (
        "Exaone",
        {
            **{**SIZES, "head_dim": 16, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 10_000.0, **STRETCHED, **SMOOTH},
        },
    ),
    "exaone4": (
        "Exaone4",
        {
            **{**SIZES, "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 24},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "hunyuan": (
        "HunYuanDenseV1",
        {
            **SIZES,
            **{"head_dim": 16, "tie_word_embeddings": True},
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 24}),
    "ministral": (
        "Ministral",
        {**SIZES, "head_dim": 16, "num_hidden_layers": 3, "layer_types": [FAR, NEAR, NEAR], "sliding_window": 24},
    ),
    "ministral3": (
        "Ministral3",
        {
            **{**SIZES, "head_dim": 16},
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10_000.0, **STRETCHED, "llama_4_scaling_beta": 0.5},
                **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        },
    ),
    "jais2": ("Jais2", {**SIZES, "head_dim": 16}),
    "llama4": (
        "Llama4",
        {
            **{**SIZES, "head_dim": 16, "num_hidden_layers": 4, "intermediate_size_mlp": 40, "moe_layers": [1, 3]},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "attention_chunk_size": 24},
            **{"floor_scale": 16, "attn_scale": 0.5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        },
    ),
    "mixtral": ("Mixtral", {**SIZES, "num_local_experts": 5}),
    "qwen2": ("Qwen2", {**SIZES, "tie_word_embeddings": True}),
    "qwen2-moe": (
        "Qwen2Moe",
        {
            **{**SIZES, "num_hidden_layers": 3, "mlp_only_layers": [1], "num_experts": 6, "num_experts_per_tok": 2},
            **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
        },
    ),
    "qwen3-moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "mellum": (
        "Mellum",
        {
            **{**MOE, "num_hidden_layers": 4, "layer_types": [NEAR, FAR, NEAR, FAR], "sliding_window": 24},
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
            "rope_parameters": {
                FAR: {"rope_type": "yarn", "rope_theta": 500_000.0, **STRETCHED, "attention_factor": 1.2},
                NEAR: {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "qwen3-moe-raw": ("Qwen3Moe", {**MOE, "norm_topk_prob": False}),
    "qwen3-next": (
        "Qwen3Next",
        {**MOE, **LINEAR, "num_hidden_layers": 4, "mlp_only_layers": [1], "shared_expert_intermediate_size": 40},
    ),
    "qwen3-5": ("Qwen3_5", {**SIZES, **LINEAR, "head_dim": 16, "num_hidden_layers": 4}),
    "qwen3-5-moe": (
        "Qwen3_5Moe",
        {
            **{**MOE, **LINEAR, "num_hidden_layers": 3, "shared_expert_intermediate_size": 40},
            **{"layer_types": ["linear_attention", "full_attention", "linear_attention"], "tie_word_embeddings": True},
        },
    ),
    "gemma": ("Gemma", {**SIZES, "head_dim": 16}),
    "gemma2": ("Gemma2", {**SIZES, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "Gemma3",
        {
            **SIZES,
            "head_dim": 16,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
            },
        },
    ),
    "gemma3n": (
        "Gemma3n",
        {
            **{**SIZES, "head_dim": 16, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "sliding_window": 24},
            **{"intermediate_size": [48, 40, 48, 48, 32], "activation_sparsity_pattern": [0.95, 0.5, 0.0, 0.8, 0.0]},
            **{"layer_types": [NEAR, FAR, NEAR, NEAR, FAR], "laurel_rank": 8, "hidden_size_per_layer_input": 16},
            "vocab_size_per_layer_input": 60,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **{**SIZES, **WIDE, "num_hidden_layers": 7, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
            **{"layer_types": [NEAR, NEAR, FAR, NEAR, FAR, NEAR, FAR], "final_logit_softcapping": 30.0},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": SIZES["vocab_size"]},
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            **{**SIZES, **WIDE, "num_hidden_layers": 3, "layer_types": [NEAR, NEAR, FAR], "attention_k_eq_v": True},
            **{"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 24},
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4-unified": (
        "Gemma4Unified",
        {
            **{**SIZES, **WIDE, "num_hidden_layers": 3, "layer_types": [NEAR, FAR, FAR], "attention_k_eq_v": True},
            **{"num_global_key_value_heads": 1, "num_kv_shared_layers": 1, "final_logit_softcapping": 30.0},
        },
    ),
    "gemma4-keys": (
        "Gemma4",
        {
            **{**SIZES, **WIDE, "num_hidden_layers": 3, "layer_types": [NEAR, FAR, FAR], "attention_k_eq_v": True},
            **{"num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0},
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            **{**SIZES, "num_hidden_layers": 4, "layer_types": ["conv", "conv", FAR, "conv"], "intermediate_size": 72},
            **{"block_multiple_of": 16, "block_ffn_dim_multiplier": 1.5, "rope_parameters": {"rope_theta": 1e4}},
        },
    ),
    "lfm2-moe": (
        "Lfm2Moe",
        {
            **{**SIZES, "num_hidden_layers": 3, "layer_types": ["conv", FAR, "conv"], "num_dense_layers": 1},
            **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5},
        },
    ),
    "lfm3": (
        "Lfm3",
        {
            **{**SIZES, "num_hidden_layers": 5, "head_dim": 16, "conv_L_cache": 7, "sliding_window": 24},
            "rope_parameters": {
                NEAR: {"rope_type": "default", "rope_theta": 1e4},
                FAR: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            **SIZES,
            "original_max_position_embeddings": 64,
            "hidden_size": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10_000.0,
                "short_factor": [1.0] * 6,
                "long_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.0],
                "partial_rotary_factor": 0.75,
            },
        },
    ),
    "phimoe": (
        "Phimoe",
        {
            **{**SIZES, "num_local_experts": 5, "attention_bias": True, "lm_head_bias": True},
            "router_jitter_noise": 0.2,  # more experts near others than with 0.01
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 192},
                **{"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 3.0, 4.0]},
                **{"short_mscale": 1.1, "long_mscale": 1.3},
            },
        },
    ),
    "gpt2": (
        "GPT2",
        {
            **{"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
            **{"bos_token_id": 63, "eos_token_id": 63},
        },
    ),
    "ernie4-5": ("Ernie4_5", {**SIZES, "head_dim": 16}),
    "ernie4-5-moe": (
        "Ernie4_5_Moe",
        {
            **{**SIZES, "num_hidden_layers": 3, "moe_intermediate_size": 24, "moe_num_experts": 6, "moe_k": 3},
            **{"moe_num_shared_experts": 2, "moe_layer_end_index": 1},
        },
    ),
    "seed-oss": ("SeedOss", {**SIZES, "head_dim": 16}),
    "smollm3": (
        "SmolLM3",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "olmo": ("Olmo", SIZES),
    "olmo2": ("Olmo2", SIZES),
    "olmo-hybrid": (
        "OlmoHybrid",
        {
            **{**SIZES, "num_hidden_layers": 3, "layer_types": ["linear_attention", FAR, "linear_attention"]},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
            **{"linear_value_head_dim": 32, "rope_parameters": {"rope_theta": None, "rope_type": "default"}},
        },
    ),
    "olmoe": ("Olmoe", {**SIZES, "num_experts": 6, "num_experts_per_tok": 3}),
    "olmo3": (
        "Olmo3",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "yarn", "rope_theta": 10_000.0, **STRETCHED},
            },
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **SIZES,
            # With two of four, one token that rounding sends to another expert outweighs all other differences.
            **{"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 3, "sliding_window": 24},
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "truncate": False, **STRETCHED},
        },
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 3}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **DEEPSEEK,
            **{"q_lora_rank": 24, "num_experts_per_tok": 3, "n_routed_experts": 8, "routed_scaling_factor": 1.5},
            **{"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**DEEPSEEK, "q_lora_rank": 24, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "n_shared_experts": 1},
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            **{**SIZES, "num_hidden_layers": 3, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
            **{"moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 3},
            "routed_scaling_factor": 1.5,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2",
        {**SIZES, "head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 3},
    ),
    "afmoe": (
        "Afmoe",
        {
            **{**MOE, "num_hidden_layers": 3, "layer_types": [NEAR, FAR, NEAR], "sliding_window": 24},
            **{"num_shared_experts": 2, "route_scale": 1.5, "mup_enabled": True},
        },
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {**SIZES, "head_dim": 16, "num_experts": 6, "moe_topk": 3}),
    "dots1": (
        "Dots1",
        {
            **{**MOE, "first_k_dense_replace": 1, "n_routed_experts": 6, "n_shared_experts": 2},
            **{"norm_topk_prob": True, "routed_scaling_factor": 1.5, "sliding_window": 24, "max_window_layers": 1},
        },
    ),
    "exaone-moe": (
        "ExaoneMoe",
        {**MOE, "num_hidden_layers": 3, "layer_types": [NEAR, FAR, NEAR], "sliding_window": 24},
    ),
    "solar-open": (
        "SolarOpen",
        {
            **{name: size for name, size in MOE.items() if name not in ("intermediate_size", "num_experts")},
            **{"n_routed_experts": 6, "routed_scaling_factor": 1.5, "attention_bias": True},
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {
            **DEEPSEEK,
            **{"num_hidden_layers": 4, "q_lora_rank": 24, "num_experts_per_tok": 3, "n_shared_experts": 1},
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            **SIZES,
            **{"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12},
            **{"qk_rope_head_dim": 16, "v_head_dim": 16, "scale_depth": 1.4, "dim_model_base": 8},
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10_000.0, **FACTORS},
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "youtu": (
        "Youtu",
        {
            **{**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 12},
            **{"qk_rope_head_dim": 16, "v_head_dim": 16},
        },
    ),
    "cwm": (
        "Cwm",
        {
            **{**SIZES, "head_dim": 16, "num_hidden_layers": 3, "layer_types": [NEAR, FAR, NEAR], "sliding_window": 24},
            "rope_parameters": {
                **{"rope_type": "llama3", "rope_theta": 10_000.0, **STRETCHED},
                **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
            },
        },
    ),
    "vaultgemma": ("VaultGemma", {**SIZES, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 20}),
    "helium": ("Helium", {**SIZES, "head_dim": 8}),
    "nemotron": ("Nemotron", {**SIZES, "head_dim": 16}),
    "granite": (
        "Granite",
        {
            **SIZES,
            **{"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
            "attention_multiplier": 0.25,
        },
    ),
    "granite-swa": (
        "GraniteSWA",
        {
            **{**SIZES, "num_hidden_layers": 3, "layer_types": [FAR, NEAR, NEAR], "sliding_window": 24},
            **{"layer_rope_theta": [0, 10_000.0, 500_000.0], "embedding_multiplier": 12.0, "logits_scaling": 8.0},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.25},
        },
    ),
    "hyperclovax": (
        "HyperCLOVAX",
        {
            **{**SIZES, "embedding_multiplier": 10.0, "logits_scaling": 0.125},
            **{"residual_multiplier": 0.5, "attention_multiplier": 0.25},
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            **{**SIZES, "num_local_experts": 5, "embedding_multiplier": 12.0, "logits_scaling": 6.0},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.25},
        },
    ),
    "granite-moe-swa": (
        "GraniteMoeSWA",
        {
            **{**SIZES, "num_hidden_layers": 3, "layer_types": [FAR, NEAR, NEAR], "sliding_window": 24},
            **{"layer_rope_theta": [0, 10_000.0, 500_000.0], "embedding_multiplier": 12.0, "logits_scaling": 8.0},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.25, "tie_word_embeddings": True},
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
        },
    ),
    "granite-moe-shared": (
        "GraniteMoeShared",
        {
            **{**SIZES, "num_local_experts": 5, "embedding_multiplier": 12.0, "logits_scaling": 6.0},
            **{"residual_multiplier": 0.22, "attention_multiplier": 0.25, "shared_intermediate_size": 40},
        },
    ),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        {
            **{**SIZES, "num_local_experts": 0, "num_experts_per_tok": 0, "mamba_n_heads": 8},
            **{"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"},
            **{"embedding_multiplier": 12.0, "logits_scaling": 10.0, "residual_multiplier": 0.22},
            **{"attention_multiplier": 0.25, "shared_intermediate_size": 48},
        },
    ),
    "granite4-h": (
        "GraniteMoeHybrid",
        {
            **{**SIZES, "num_hidden_layers": 4, "num_local_experts": 0, "num_experts_per_tok": 0},
            **{"layer_types": [*["linear_attention"] * 2, FAR, "linear_attention"], "shared_intermediate_size": 48},
            **{"mamba_n_heads": 4, "mamba_n_groups": 2, "mamba_d_state": 16, "rms_norm_eps": 1e-5},
            **{"embedding_multiplier": 12.0, "logits_scaling": 10.0, "residual_multiplier": 0.22},
            **{"attention_multiplier": 0.25, "tie_word_embeddings": True},
        },
    ),
    "bamba": (
        "Bamba",
        {
            **{**SIZES, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 32},
            "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "mamba2": (
        "Mamba2",
        {
            **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id")},
            **{"pad_token_id": 0, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 16},
            **{"n_groups": 2, "chunk_size": 64},
        },
    ),
    "falcon-h1": (
        "FalconH1",
        {
            **{**SIZES, "head_dim": 16, "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 16},
            **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.9, 0.6]},
            **{"attention_in_multiplier": 1.25, "attention_out_multiplier": 0.9, "key_multiplier": 0.4},
            **{"ssm_in_multiplier": 1.25, "ssm_multipliers": [0.3, 0.25, 0.4, 0.5, 0.35], "ssm_out_multiplier": 0.7},
        },
    ),
    "nemotron-h": (
        "NemotronH",
        {
            **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
            "layers_block_type": ["linear_attention", "mlp", "linear_attention", FAR, "moe", "mlp"],
            **{"head_dim": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2},
            **{"n_routed_experts": 6, "moe_intermediate_size": 24, "moe_shared_expert_intermediate_size": 40},
            **{"routed_scaling_factor": 2.5, "num_experts_per_tok": 2},
        },
    ),
    "glm": ("Glm", {**SIZES, "head_dim": 16}),
    "glm4": ("Glm4", {**SIZES, "head_dim": 16}),
    "cohere": ("Cohere", {**SIZES, "use_qk_norm": True}),
    "cohere2": (
        "Cohere2",
        {
            **SIZES,
            "num_hidden_layers": 3,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "cohere2-moe": (
        "Cohere2Moe",
        {
            **{**SIZES, "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": 2},
            **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 40, "num_experts": 6},
            **{"num_experts_per_tok": 3, "expert_selection_fn": "sigmoid", "num_shared_experts": 2},
        },
    ),
    "starcoder2": ("Starcoder2", {**SIZES, "sliding_window": 24}),
    "stablelm": ("StableLm", SIZES),
    "falcon": ("Falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt-neox": ("GPTNeoX", SIZES),
    "phi": ("Phi", SIZES),
    "opt": ("OPT", {**SIZES, "ffn_dim": 48}),
    "opt-350m": ("OPT", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 24, "do_layer_norm_before": False}),
}
"""Small models of every family that a spec can say: name → the family's name in transformers, its settings."""
ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", SIZES),
    "xlm-roberta": ("XLMRobertaModel", {**SIZES, "type_vocab_size": 1, "pad_token_id": 1}),
    "distil-bert": (
        "DistilBertModel",
        {
            **{"vocab_size": 64, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
            "max_position_embeddings": 256,
        },
    ),
    "modern-bert": (
        "ModernBertModel",
        {**SIZES, "num_hidden_layers": 4, "local_attention": 40, "cls_token_id": 1, "sep_token_id": 63},
    ),
    "euro-bert": ("EuroBertModel", SIZES),
    "jina-embeddings-v3": ("JinaEmbeddingsV3Model", {**SIZES, "pad_token_id": 1}),
    "mpnet": ("MPNetModel", {**SIZES, "pad_token_id": 1}),
    "nomic-bert": ("NomicBertModel", SIZES),
    "embedding-gemma": (
        "Gemma3TextModel",
        {
            **{**SIZES, "head_dim": 16, "sliding_window": 40, "query_pre_attn_scalar": 20},
            **{"layer_types": [NEAR, FAR], "use_bidirectional_attention": True},
        },
    ),
}
"""Models whose tokens attend to later ones, with their class."""

CAUSAL = {
    "Exaone": "LlamaForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "Gemma3Eye": "Gemma3ForConditionalGeneration",
    "Gemma4Eye": "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedEye": "Gemma4UnifiedForConditionalGeneration",
    "Glm4v": "Glm4vForConditionalGeneration",
    "Glm4vMoe": "Glm4vMoeForConditionalGeneration",
    "Idefics3": "Idefics3ForConditionalGeneration",
    "InternVL": "InternVLForConditionalGeneration",
    "Lfm2Vl": "Lfm2VlForConditionalGeneration",
    "Llama4Eye": "Llama4ForConditionalGeneration",
    "Llava": "LlavaForConditionalGeneration",
    "LlavaNext": "LlavaNextForConditionalGeneration",
    "Mistral3": "Mistral3ForConditionalGeneration",
    "Qwen2VL": "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VL": "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VL": "Qwen3VLForConditionalGeneration",
    "Qwen3_5Eye": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeEye": "Qwen3_5MoeForConditionalGeneration",
    "Qwen3VLMoe": "Qwen3VLMoeForConditionalGeneration",
    "SmolVLM": "SmolVLMForConditionalGeneration",
}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")
CONFIGS = {
    "Gemma4": "Gemma4TextConfig",
    "Gemma4Eye": "Gemma4Config",
    "Gemma4Unified": "Gemma4UnifiedTextConfig",
    "Gemma4UnifiedEye": "Gemma4UnifiedConfig",
    "Gemma3": "Gemma3TextConfig",
    "Gemma3n": "Gemma3nTextConfig",
    "Gemma3Eye": "Gemma3Config",
    "Llama4": "Llama4TextConfig",
    "Llama4Eye": "Llama4Config",
    "Qwen3_5": "Qwen3_5TextConfig",
    "Qwen3_5Moe": "Qwen3_5MoeTextConfig",
    "Qwen3_5Eye": "Qwen3_5Config",
    "Qwen3_5MoeEye": "Qwen3_5MoeConfig",
}
EYE: dict[str, Any] = {
    **{"hidden_size": 32, "image_size": 28, "intermediate_size": 48, "num_attention_heads": 2},
    **{"num_hidden_layers": 2, "patch_size": 14},
}
QWEN_EYE: dict[str, Any] = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 14},
    "out_hidden_size": 32,
}
QWEN_TOKENS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
SECTIONS = {"rope_type": "default", "rope_theta": 10_000.0}
MIXED = {**SECTIONS, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
WITH_EYES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "gemma3-eye": (
        *("Gemma3Eye", "gemma3", {}),
        {"vision_config": {**EYE, "vision_use_head": False}, "mm_tokens_per_image": 4, "image_token_index": 5},
    ),
    "gemma4-eye": (
        *("Gemma4Eye", "gemma4", {}),
        {
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2},
                **{"num_key_value_heads": 2, "head_dim": 16, "patch_size": 14, "position_embedding_size": 16},
            },
            **{"audio_config": None, "image_token_id": 64, "video_token_id": 65, "audio_token_id": 66},
        },
    ),
    "gemma4-unified-eye": (
        *("Gemma4UnifiedEye", "gemma4-unified", {}),
        {
            **{"vision_config": {"mm_embed_dim": 32, "mm_posemb_size": 8}, "audio_config": None},
            **{"image_token_id": 64, "video_token_id": 65, "audio_token_id": 66},
        },
    ),
    "internvl-eye": (
        *("InternVL", "qwen3-moe", {"model_type": "qwen3_moe"}),
        {"vision_config": {**EYE, "attention_bias": True}, "image_token_id": 5, "tie_word_embeddings": False},
    ),
    "llama4-eye": (
        *("Llama4Eye", "llama4", {"moe_layers": None, "interleave_moe_layer_step": 2, "use_qk_norm": False}),
        {
            "vision_config": {
                **{**EYE, "projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            **{"image_token_index": 5, "boi_token_index": 6, "eoi_token_index": 7},
        },
    ),
    "ministral3-eye": (
        *("Mistral3", "ministral3", {"model_type": "ministral3"}),
        {"vision_config": {**EYE, "head_dim": 16}, "image_token_index": 5, "tie_word_embeddings": False},
    ),
    "mistral-eye": (
        *("Mistral3", "mistral", {"model_type": "mistral", "tie_word_embeddings": True}),
        {"vision_config": {**EYE, "head_dim": 16}, "image_token_index": 5},
    ),
    "qwen2-vl": (
        *("Qwen2VL", "qwen2", {"rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]}}),
        {"vision_config": {**QWEN_EYE, "embed_dim": 32}, **QWEN_TOKENS, "tie_word_embeddings": True},
    ),
    "qwen2.5-vl": (
        *("Qwen2_5_VL", "qwen2", {"rope_parameters": {**SECTIONS, "mrope_section": [1, 1, 2]}}),
        {"vision_config": {**QWEN_EYE, "fullatt_block_indexes": [1]}, **QWEN_TOKENS, "tie_word_embeddings": False},
    ),
    "qwen3-5-eye": (
        *("Qwen3_5Eye", "qwen3-5"),
        {"rope_parameters": {**MIXED, "partial_rotary_factor": 0.5}, "tie_word_embeddings": True},
        {"vision_config": QWEN_EYE, **QWEN_TOKENS, "tie_word_embeddings": True},
    ),
    "qwen3-5-moe-eye": (
        *("Qwen3_5MoeEye", "qwen3-5-moe", {"rope_parameters": {**MIXED, "partial_rotary_factor": 0.5}}),
        {"vision_config": QWEN_EYE, **QWEN_TOKENS},
    ),
    "qwen3-vl": (
        *("Qwen3VL", "llama", {"rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}),
        {"vision_config": {**QWEN_EYE, "deepstack_visual_indexes": [0]}, **QWEN_TOKENS},
    ),
    "qwen3-vl-moe": (
        "Qwen3VLMoe",
        *("qwen3-moe", {"rope_parameters": {**SECTIONS, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}),
        {"vision_config": {**QWEN_EYE, "deepstack_visual_indexes": [0]}, **QWEN_TOKENS},
    ),
}
"""Multimodal models: their family, the form of the text model, and the settings of the text model and around it."""


def small_model(name: str, **changes: Any) -> Any:
    """Return a seeded model of one of the FORMS or WITH_EYES, with changes, its weights rounded to bfloat16."""
    if name in WITH_EYES:
        family, form, own, around = WITH_EYES[name]
        return model_of(family, {"text_config": FORMS[form][1] | own | changes, **around})
    family, settings = FORMS[name]
    return model_of(family, settings | changes)


def small_vision_model(settings: dict[str, Any]) -> Any:
    """Return a seeded model with these settings that reads images, its weights rounded to bfloat16."""
    own = {key: value for key, value in settings.items() if key != "architectures"}
    (family,) = (name for name, architecture in CAUSAL.items() if architecture == settings["architectures"][0])
    return model_of(family, copy.deepcopy(own))


def image_rows(model: Any, pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the rows of an image of normalised pixels, `[3, height, width]`."""
    with torch.no_grad():
        features = model.model.get_image_features(**_image_inputs(model, pixels), return_dict=True)
    deep = getattr(features, "deepstack_features", None) or []
    parts = [torch.cat([torch.as_tensor(each) for each in rows]) for rows in (features.pooler_output, *deep)]
    found: NDArray[np.float32] = torch.cat(parts, dim=1).float().numpy()
    if _named(model, "LlavaNext"):
        vision = model.config.vision_config
        of_whole = (vision.image_size // vision.patch_size) ** 2
        return found[:of_whole] if pixels.shape[1:] == (vision.image_size,) * 2 else found[of_whole:]
    return found


def logits_with_image(model: Any, tokens: Sequence[int], pixels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the logits of every position of a text with the placeholders of an image: `[num_tokens, vocab_size]`."""
    with torch.no_grad():
        inputs = _image_inputs(model, pixels)
        kinds = {"Gemma3": "token_type_ids", "Gemma4": "mm_token_type_ids", "Glm4v": "mm_token_type_ids"}
        kinds["Qwen"] = "mm_token_type_ids"
        for field in (field for family, field in kinds.items() if _named(model, family)):
            inputs[field] = torch.tensor([[int(token == model.config.image_token_id) for token in tokens]])
        if _named(model, "Gemma4Unified"):
            inputs["attention_mask"] = _masks_of(model, inputs["mm_token_type_ids"])
        output = model(torch.tensor([list(tokens)]), use_cache=False, **inputs)
    logits: NDArray[np.float32] = output.logits[0].float().numpy()
    return logits


def _masks_of(model: Any, kinds: torch.Tensor) -> Any:
    """Return the masks that `generate` makes: without them, this model attends beyond windows to all of an image."""
    places, config = torch.arange(kinds.shape[1])[None], model.config
    rows = torch.zeros(1, kinds.shape[1], config.get_text_config().hidden_size)
    return model.create_masks_for_generate(config, rows, None, None, places, mm_token_type_ids=kinds)


def _image_inputs(model: Any, pixels: NDArray[np.float32]) -> dict[str, Any]:
    batch = torch.tensor(np.ascontiguousarray(pixels))[None].to(model.dtype)
    if _named(model, "Idefics3", "SmolVLM"):
        return {"pixel_values": batch[None]}
    if _named(model, "Lfm2Vl"):
        cut = _cut(batch, model.config.vision_config.patch_size, 1).permute(0, 1, 3, 4, 2)
        shape = torch.tensor([[each // model.config.vision_config.patch_size for each in pixels.shape[1:]]])
        patches = cut.flatten(2)
        return {
            "pixel_values": patches,
            "spatial_shapes": shape,
            "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long),
        }
    if _named(model, "Glm4v", "Qwen"):
        vision = model.config.vision_config
        frames = _cut(batch, vision.patch_size, vision.spatial_merge_size)[:, :, :, None]
        grid = torch.tensor([[1, *(each // vision.patch_size for each in pixels.shape[1:])]])
        return {
            "pixel_values": frames.repeat(1, 1, 1, vision.temporal_patch_size, 1, 1).flatten(2)[0],
            "image_grid_thw": grid,
        }
    if _named(model, "LlavaNext"):  # the copy of the whole, and the tiles of the larger image; one of both is empty
        side, (height, width) = model.config.vision_config.image_size, pixels.shape[1:]
        tiles = _cut(batch, side, 1)[0]
        if len(tiles) == 1:
            height, width = model.config.image_grid_pinpoints[0]
            whole, tiles = tiles, torch.zeros(height * width // side**2, *tiles.shape[1:], dtype=model.dtype)
        else:
            whole = torch.zeros_like(tiles[:1])
        return {"pixel_values": torch.cat([whole, tiles])[None], "image_sizes": torch.tensor([[height, width]])}
    if _named(model, "Gemma4"):
        vision = model.config.vision_config
        is_unified = _named(model, "Gemma4Unified")
        size = vision.patch_size * (vision.pooling_kernel_size if is_unified else 1)
        patches = _cut(batch, size, 1).permute(0, 1, 3, 4, 2).flatten(2)
        places = torch.cartesian_prod(*(torch.arange(each // size) for each in pixels.shape[1:])).flip(1)
        return {"pixel_values": patches if is_unified else (patches + 1) / 2, "image_position_ids": places[None]}
    inputs: dict[str, Any] = {"pixel_values": batch}
    if _named(model, "Mistral3"):
        inputs["image_sizes"] = torch.tensor([pixels.shape[1:]])
    return inputs


def _cut(batch: torch.Tensor, size: int, merge: int) -> torch.Tensor:
    """Return the patches of images, in squares of `merge` × `merge`: `[images, patches, 3, size, size]`."""
    number, colours, height, width = batch.shape
    rows, columns = height // size // merge, width // size // merge
    cut = batch.reshape(number, colours, rows, merge, size, columns, merge, size)
    return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(number, -1, colours, size, size)


def _named(model: Any, *families: str) -> bool:
    return type(model).__name__.startswith(families)


def small_encoder(name: str) -> Any:
    """Return a seeded model of one of the ENCODERS, its weights rounded to bfloat16."""
    architecture, settings = ENCODERS[name]
    has_groups = architecture.startswith(("EuroBert", "Gemma"))  # several heads with the same keys
    own = {key: value for key, value in settings.items() if key != "num_key_value_heads" or has_groups}
    config = getattr(transformers, architecture.removesuffix("Model") + "Config")(**own)
    config.architectures = [architecture]
    model = tiny_model(architecture, config)
    for tensor in model.parameters():
        tensor.copy_(tensor.bfloat16().float())
    return model


def hidden_states(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the last hidden state of every position: `[num_tokens, hidden_size]`."""
    with torch.no_grad():
        states: NDArray[np.float32] = model(torch.tensor([list(tokens)])).last_hidden_state[0].numpy()
    return states


def model_of(family: str, settings: dict[str, Any]) -> Any:
    """Return a seeded model of a family, its weights rounded to bfloat16."""
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**settings)
    config.architectures = [CAUSAL.get(family, f"{family}ForCausalLM")]
    model = tiny_model(config.architectures[0], config)
    for tensor in model.parameters():
        tensor.copy_(tensor.bfloat16().float())
    for number, (name, bound) in enumerate(each for each in model.named_buffers() if each[0].endswith(BOUNDS)):
        bound.fill_((1 + number % 7 / 8) * (-1 if name.endswith("min") else 1))
    for name, vector in ((name, each) for name, each in model.named_buffers() if "std_" in name):
        vector.copy_((torch.randn(vector.shape) * 0.2 + float("scale" in name)).bfloat16().float())
    for number, scale in enumerate(each for name, each in model.named_buffers() if name.endswith("layer_scalar")):
        scale.fill_(0.5 + number / 8)
    for offset in (each for name, each in model.named_buffers() if name.endswith("expert_bias")):
        offset.copy_(torch.arange(len(offset)) % 3 / 8)
    return model


def tiny_qwen3_model(**settings: Any) -> Any:
    """Return a seeded tiny Qwen3: head_dim 32 where hidden size / heads is 16, large weights."""
    config = transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        eos_token_id=127,
        **settings,
    )
    return tiny_model("Qwen3ForCausalLM", config)


def load(folder: Path) -> Any:
    """Return the model of a folder in float32, with eager attention."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    model.requires_grad_(False)
    return model


def tiny_model(architecture: str, config: Any) -> Any:
    """Return a seeded model of a config with large weights."""
    torch.manual_seed(0)
    model: Any = getattr(transformers, architecture)(config).eval()
    model.set_attn_implementation("eager")
    model.requires_grad_(False)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            is_norm = tensor.ndim == 1 and not name.endswith("bias")
            is_vector = tensor.ndim == 1 or name.endswith("e_score_correction_bias")
            spread = 0.2 if is_vector else 1.5 * tensor.shape[-1] ** -0.5
            noise = torch.randn(tensor.shape) * spread
            tensor.copy_(1 + noise if is_norm else noise)
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.copy_((torch.randn(tensor.shape) * 0.2).bfloat16().float())
    return model


def save(model: Any, folder: Path) -> Path:
    """Write the model's folder as transformers writes it."""
    model.save_pretrained(folder, safe_serialization=True)
    return folder


def all_logits(model: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits of every position: `[num_tokens, vocab_size]`."""
    if _named(model, "Llama4ForConditional"):  # transformers needs an image for it
        model = model.language_model
    with torch.no_grad():
        output = model(torch.tensor([list(tokens)]), use_cache=False)
    logits: NDArray[np.float32] = output.logits[0].float().numpy()
    return logits


def greedy(model: Any, tokens: Sequence[int], count: int) -> list[int]:
    """Return the next `count` tokens, each the argmax of a whole fresh pass."""
    known = list(tokens)
    for _ in range(count):
        known.append(int(all_logits(model, known)[-1].argmax()))
    return known[len(tokens) :]
