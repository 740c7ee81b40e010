"""Model settings: transformers 4 and 5 say the same model, and what is not understood is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from quire.compute import models
from quire.compute.gguf.settings import ARCHITECTURES
from quire.compute.gguf.tokenizer import SPLITTERS
from quire.compute.models import NO_SETTINGS, TEXT_ONLY, ModelDescription, read_model
from quire.compute.models.base import LayerSpec
from quire.compute.models.generation import GenerationDefaults
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.source import ModelFolder
from quire.compute.models.sublayers import Activation, RopeSpec
from quire.compute.weights.decoder_weights import expected_tensors, weight_bytes
from quire.core.errors import CheckpointError, InvariantError
from quire.core.kv_spec import KVGroup
from support.spec_models import PLAIN, SPECS, rope
from support.tiny_checkpoint import tiny_llama_config, tiny_qwen3_config

# config.json of Qwen3-0.6B, as it was published with transformers 4.
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# config.json of Llama-3.2-1B and of Llama-2-7B, as they were published with transformers 4.
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 24}
ROOT = Path(__file__).parents[2]
KEPT = ROOT / "src" / "quire" / "simulate" / "models"
# What config.json says of the model in other published folders, and how many parameters that makes.
PUBLISHED: dict[str, tuple[dict[str, object], int]] = {
    "Mistral-7B-v0.1": (
        {
            **{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096},
            **{"intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32},
            **{"num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
            **{"sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 32000},
        },
        7_241_732_096,
    ),
    "Llama-4-Scout": (  # the text model
        {
            **{"architectures": ["Llama4ForConditionalGeneration"], "tie_word_embeddings": False},
            "vision_config": {"model_type": "llama4_vision_model"},
            "text_config": {
                **{"attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192},
                **{"attn_temperature_tuning": 4, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120},
                **{"interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
                **{"max_position_embeddings": 10485760, "model_type": "llama4_text", "no_rope_layers": []},
                **{"num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48},
                **{"num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05, "rope_theta": 500000.0},
                "rope_scaling": {
                    **{"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 0.25, "rope_type": "llama3"},
                    "original_max_position_embeddings": 8192,
                },
                **{"use_qk_norm": True, "vocab_size": 202048},
            },
        },
        107_769_861_120,
    ),
    "Mamba-Codestral-7B": (
        {
            **{"architectures": ["Mamba2ForCausalLM"], "conv_kernel": 4, "expand": 2, "head_dim": 64, "n_groups": 8},
            **{"hidden_act": "silu", "hidden_size": 4096, "layer_norm_epsilon": 1e-05, "num_heads": 128},
            **{"num_hidden_layers": 64, "rescale_prenorm_residual": False, "residual_in_fp32": True, "state_size": 128},
            **{"tie_word_embeddings": False, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1},
            **{"time_step_min": 0.001, "use_bias": False, "use_conv_bias": True, "vocab_size": 32768},
        },
        7_285_403_648,
    ),
    "Olmo-Hybrid-7B": (
        {
            **{"architectures": ["OlmoHybridForCausalLM"], "attention_bias": False, "hidden_act": "silu"},
            **{"hidden_size": 3840, "intermediate_size": 11008, "linear_allow_neg_eigval": True},
            **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 96, "linear_num_key_heads": 30},
            **{"linear_num_value_heads": 30, "linear_value_head_dim": 192, "max_position_embeddings": 65536},
            **{"num_attention_heads": 30, "num_hidden_layers": 32, "num_key_value_heads": 30, "rms_norm_eps": 1e-06},
            **{"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "tie_word_embeddings": False},
            "vocab_size": 100352,
        },
        7_430_870_688,
    ),
    "Apertus-8B": (
        {
            **{"architectures": ["ApertusForCausalLM"], "attention_bias": False, "hidden_act": "xielu"},
            **{"hidden_size": 4096, "intermediate_size": 21504, "max_position_embeddings": 65536},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
            **{"rope_theta": 12000000, "tie_word_embeddings": False, "vocab_size": 131072},
            "rope_scaling": {
                **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
                "original_max_position_embeddings": 8192,
            },
        },
        8_053_338_240,
    ),
    "LFM3-1.7B": (
        {
            **{"architectures": ["Lfm3ForCausalLM"], "model_type": "lfm3", "vocab_size": 128_000, "hidden_size": 2048},
            **{"intermediate_size": 7680, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 128},
            **{"num_key_value_heads": 4, "max_position_embeddings": 128_000, "norm_eps": 1e-5, "sliding_window": 256},
            **{"conv_L_cache": 7, "conv_bias": False, "attention_bias": False, "tie_word_embeddings": True},
            **{"use_sandwich_norm": True, "use_attention_gate": True, "eos_token_id": 124_900},
        },
        1_728_801_536,
    ),
    "MiniMax-M2": (
        {
            **{"architectures": ["MiniMaxM2ForCausalLM"], "attn_type_list": [1] * 62, "head_dim": 128},
            **{"hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536},
            **{"max_position_embeddings": 196608, "num_attention_heads": 48, "num_experts_per_tok": 8},
            **{"num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256},
            **{"qk_norm_type": "per_layer"},
            **{
                "quantization_config": {
                    "fmt": "float8_e4m3fn",
                    "quant_method": "fp8",
                    "weight_block_size": [128, 128],
                    "activation_scheme": "dynamic",
                    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
                }
            },
            **{"rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid"},
            **{"shared_intermediate_size": 0, "sliding_window": None, "tie_word_embeddings": False},
            **{"use_routing_bias": True, "vocab_size": 200064},
        },
        228_689_764_864,
    ),
    "Trinity-Mini": (
        {
            **{"architectures": ["AfmoeForCausalLM"], "global_attn_every_n_layers": 4, "head_dim": 128},
            **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144},
            **{"max_position_embeddings": 131072, "moe_intermediate_size": 1024, "mup_enabled": True, "n_group": 1},
            **{"num_attention_heads": 32, "num_dense_layers": 2, "num_experts": 128, "num_experts_per_tok": 8},
            **{"num_hidden_layers": 32, "num_key_value_heads": 4, "num_shared_experts": 1, "rms_norm_eps": 1e-05},
            **{"rope_scaling": None, "rope_theta": 10000, "route_norm": True, "route_scale": 2.826},
            **{"score_func": "sigmoid", "sliding_window": 2048, "tie_word_embeddings": False, "topk_group": 1},
            **{"vocab_size": 200192},
        },
        26_123_974_400,
    ),
    "Hunyuan-A13B": (
        {
            **{"architectures": ["HunYuanMoEV1ForCausalLM"], "attention_bias": False, "attention_head_dim": 128},
            **{"hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 3072},
            **{"max_position_embeddings": 32768, "moe_intermediate_size": [3072] * 32, "moe_layer_num_skipped": 0},
            **{"moe_topk": [8] * 32, "n_group": None, "norm_topk_prob": True, "num_attention_heads": 32},
            **{"num_experts": 64, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_shared_expert": [1] * 32},
            **{"rms_norm_eps": 1e-05},
            **{
                "rope_scaling": {
                    "alpha": 1000.0,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "factor": 1.0,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "type": "dynamic",
                }
            },
            **{"rope_theta": 10000.0, "routed_scaling_factor": 1.0, "tie_word_embeddings": True, "topk_group": None},
            **{"use_cla": False, "use_qk_norm": True, "vocab_size": 128167},
        },
        80_393_183_232,
    ),
    "Falcon-H1-0.5B": (
        {
            **{"architectures": ["FalconH1ForCausalLM"], "attention_bias": False, "attention_in_multiplier": 1.0},
            **{"attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854249492381, "head_dim": 64},
            **{"hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 2048, "key_multiplier": 0.390625},
            **{"lm_head_multiplier": 0.0390625, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64},
            **{"mamba_d_ssm": 1536, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1},
            **{"mamba_n_heads": 24, "mamba_norm_before_gate": False, "mamba_proj_bias": False},
            **{"mamba_rms_norm": False, "max_position_embeddings": 16384, "mlp_bias": False},
            **{"mlp_multipliers": [0.8838834764831844, 0.5859375], "num_attention_heads": 8},
            **{"num_hidden_layers": 36, "num_key_value_heads": 2, "projectors_bias": False, "rms_norm_eps": 1e-05},
            **{"rope_scaling": None, "rope_theta": 100000000000.0, "ssm_in_multiplier": 1.25},
            **{"ssm_multipliers": [0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738]},
            **{"ssm_out_multiplier": 0.23570226039551587, "tie_word_embeddings": False, "vocab_size": 32784},
        },
        521_411_104,
    ),
    "Mixtral-8x7B-v0.1": (
        {
            **{"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096},
            **{"intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32},
            **{"num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8},
            **{"rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False},
            **{"vocab_size": 32000},
        },
        46_702_792_704,
    ),
    "Ministral-8B-Instruct-2410": (
        {
            **{"architectures": ["MinistralForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096},
            **{"intermediate_size": 12288, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 9},
            **{"max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 36},
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": 32768, "vocab_size": 131072},
            **{"rope_parameters": {"rope_theta": 100000000.0, "rope_type": "default"}, "tie_word_embeddings": False},
        },
        8_019_808_256,
    ),
    "Ministral-3-3B": (  # the text model alone
        {
            **{"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16"},
            "text_config": {
                **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 9216},
                **{"max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 32},
                **{"num_hidden_layers": 26, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "sliding_window": None},
                **{"tie_word_embeddings": True, "vocab_size": 131072},
                "rope_parameters": {
                    **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1},
                    **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384},
                    **{"rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
                },
            },
            "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        },
        3_429_006_336,
    ),
    "Mistral-Small-3.2-24B": (  # the text model alone
        {
            **{"architectures": ["Mistral3ForConditionalGeneration"], "torch_dtype": "bfloat16"},
            "text_config": {
                **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 32768},
                **{"max_position_embeddings": 131072, "model_type": "mistral", "num_attention_heads": 32},
                **{"num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
                **{"rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072},
            },
            "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
        },
        23_572_403_200,
    ),
    "ERNIE-4.5-0.3B": (
        {
            **{"architectures": ["Ernie4_5ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024},
            **{"intermediate_size": 3072, "max_position_embeddings": 131072, "num_attention_heads": 16},
            **{"num_hidden_layers": 18, "num_key_value_heads": 2, "rms_norm_eps": 1e-05, "rope_scaling": None},
            **{"rope_theta": 500000, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False},
            "vocab_size": 103424,
        },
        360_748_032,
    ),
    "ERNIE-4.5-21B-A3B": (
        {
            **{"architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_act": "silu", "hidden_size": 2560},
            **{"intermediate_size": 12288, "max_position_embeddings": 131072, "moe_intermediate_size": 1536},
            **{"moe_k": 6, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64},
            **{"moe_num_shared_experts": 2, "num_attention_heads": 20, "num_hidden_layers": 28},
            **{"num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_scaling": {}, "rope_theta": 500000},
            **{"tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "vocab_size": 103424},
        },
        21_825_437_888,
    ),
    "Phi-3.5-MoE": (
        {
            **{"architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "hidden_act": "silu"},
            **{"auto_map": {"AutoModelForCausalLM": "modeling_phimoe.PhiMoEForCausalLM"}, "hidden_size": 4096},
            **{"input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True},
            **{"max_position_embeddings": 131072, "num_attention_heads": 32, "num_experts_per_tok": 2},
            **{"num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-05},
            **{"original_max_position_embeddings": 4096, "rope_theta": 10000.0, "router_jitter_noise": 0.01},
            "rope_scaling": {
                **{
                    "long_factor": [2.0 + 0.5 * i for i in range(64)],
                    "short_factor": [1.0 + 0.1 * i for i in range(64)],
                },
                **{"long_mscale": 1.243163121016122, "short_mscale": 1.1, "type": "longrope"},
                "original_max_position_embeddings": 4096,
            },
            **{"sliding_window": 131072, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32064},
        },
        41_873_153_344,
    ),
    "Seed-OSS-36B": (
        {
            **{"architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_out_bias": False},
            **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 27648},
            **{"max_position_embeddings": 524288, "mlp_bias": False, "num_attention_heads": 80},
            **{"num_hidden_layers": 64, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-06},
            **{"rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False},
            **{"torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 155136},
        },
        36_151_104_512,
    ),
    "Qwen2.5-VL-3B": (  # the text model alone
        {
            **{"architectures": ["Qwen2_5_VLForConditionalGeneration"], "hidden_act": "silu", "hidden_size": 2048},
            **{"intermediate_size": 11008, "max_position_embeddings": 128000, "max_window_layers": 70},
            **{"num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 2, "rms_norm_eps": 1e-06},
            **{"rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"}, "rope_theta": 1000000.0},
            **{"sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16"},
            **{"use_sliding_window": False, "vision_config": {"depth": 32}, "vocab_size": 151936},
        },
        3_085_938_688,
    ),
    "Qwen3-VL-4B": (  # the text model alone
        {
            **{"architectures": ["Qwen3VLForConditionalGeneration"], "tie_word_embeddings": True},
            "text_config": {
                **{"attention_bias": False, "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128},
                **{"hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728},
                **{"max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 36},
                **{"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "vocab_size": 151936},
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "tie_word_embeddings": True,
            },
            "vision_config": {"depth": 24},
        },
        4_022_468_096,
    ),
    "Qwen3-VL-30B-A3B": (  # the text model alone
        {
            **{"architectures": ["Qwen3VLMoeForConditionalGeneration"], "tie_word_embeddings": False},
            "text_config": {
                **{"attention_bias": False, "decoder_sparse_step": 1, "dtype": "bfloat16", "eos_token_id": 151645},
                **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144},
                **{"max_position_embeddings": 262144, "mlp_only_layers": [], "moe_intermediate_size": 768},
                **{"norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8},
                **{"num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000},
                "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
                "vocab_size": 151936,
            },
            "vision_config": {"depth": 27},
        },
        30_532_122_624,
    ),
    "Qwen2.5-0.5B": (
        {
            **{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896},
            **{"intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24},
            **{"num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06},
            **{"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False},
            **{"use_sliding_window": False, "vocab_size": 151936},
        },
        494_032_768,
    ),
    "gpt-oss-20b": (
        {
            **{"architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4, "head_dim": 64},
            **{"hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880},
            **{"layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072},
            **{"num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8},
            **{"num_local_experts": 32, "rms_norm_eps": 1e-05, "rope_theta": 150000, "sliding_window": 128},
            **{"swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088},
            "rope_scaling": {
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096},
                **{"rope_type": "yarn", "truncate": False},
            },
            "quantization_config": {
                "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
                "quant_method": "mxfp4",
            },
        },
        20_914_757_184,
    ),
    "DeepSeek-V2-Lite": (json.loads((KEPT / "deepseek-v2-lite.json").read_text()), 15_706_484_224),
    "DeepSeek-V2": (
        {
            **json.loads((KEPT / "deepseek-v2-lite.json").read_text()),
            **{"hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8},
            **{"n_routed_experts": 160, "num_attention_heads": 128, "num_hidden_layers": 60, "q_lora_rank": 1536},
            **{"num_key_value_heads": 128, "routed_scaling_factor": 16.0, "topk_group": 3},
            **{"topk_method": "group_limited_greedy"},
        },
        235_741_434_880,
    ),
    "DeepSeek-V3": (
        {
            **{"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_size": 7168},
            **{"intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840, "moe_layer_freq": 1},
            **{"moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1},
            **{"norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61},
            **{"num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128},
            **{"qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5},
            **{"scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc"},
            **{"v_head_dim": 128, "vocab_size": 129280},
            "rope_scaling": {
                **{"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
                **{"original_max_position_embeddings": 4096, "type": "yarn"},
            },
        },
        671_026_419_200,
    ),
    "AFM-4.5B": (
        {
            **{"architectures": ["ArceeForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "relu2"},
            **{"hidden_size": 2560, "intermediate_size": 18432, "max_position_embeddings": 65536, "mlp_bias": False},
            **{"num_attention_heads": 20, "num_hidden_layers": 36, "num_key_value_heads": 4, "rms_norm_eps": 1e-05},
            "rope_scaling": {
                **{"beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0},
                **{"original_max_position_embeddings": 4096, "rope_type": "yarn"},
            },
            **{"rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 128004},
        },
        4_619_184_640,
    ),
    "EXAONE-3.5-2.4B": (
        {
            **{"activation_function": "silu", "architectures": ["ExaoneForCausalLM"], "attention_dropout": 0.0},
            **{"embed_dropout": 0.0, "head_dim": 80, "hidden_size": 2560, "intermediate_size": 7168},
            **{"layer_norm_epsilon": 1e-05, "max_position_embeddings": 32768, "model_type": "exaone"},
            **{"num_attention_heads": 32, "num_key_value_heads": 8, "num_layers": 30, "rope_theta": 1000000},
            "rope_scaling": {
                **{"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
            "vocab_size": 102400,
        },
        2_405_327_360,
    ),
    "EXAONE-4.0-32B": (
        {
            **{"architectures": ["Exaone4ForCausalLM"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120},
            **{"intermediate_size": 27392, "max_position_embeddings": 131072, "num_attention_heads": 40},
            **{"num_hidden_layers": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000},
            "rope_scaling": {
                **{"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
            **{"sliding_window": 4096, "sliding_window_pattern": "LLLG", "tie_word_embeddings": False},
            **{"vocab_size": 102400},
        },
        32_003_216_384,
    ),
    "EXAONE-4.0-1.2B": (
        {
            **{"architectures": ["Exaone4ForCausalLM"], "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048},
            **{"intermediate_size": 4096, "layer_types": ["full_attention"] * 30, "max_position_embeddings": 65536},
            **{"num_attention_heads": 32, "num_hidden_layers": 30, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
            "rope_scaling": {
                **{"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "llama3"},
            },
            **{"rope_theta": 1000000, "sliding_window": None, "sliding_window_pattern": None},
            **{"tie_word_embeddings": True, "vocab_size": 102400},
        },
        1_279_391_488,
    ),
    "granite-swash-3b-a600m": (
        {
            **{"architectures": ["GraniteMoeSWAForCausalLM"], "attention_bias": False},
            **{"attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu"},
            **{"hidden_size": 1280, "intermediate_size": 512, "logits_scaling": 5, "max_position_embeddings": 8192},
            **{"model_type": "granitemoe_swa", "num_attention_heads": 20, "num_experts_per_tok": 4},
            **{"num_hidden_layers": 28, "num_key_value_heads": 4, "num_local_experts": 48},
            **{"residual_multiplier": 0.26, "shared_intermediate_size": 1280, "sliding_window": 128},
            "layer_types": [
                "sliding_attention" if layer and layer % 4 != 3 else "full_attention" for layer in range(28)
            ],
            **{"tie_word_embeddings": True, "vocab_size": 100352},
        },
        3_020_382_000,
    ),
    "HyperCLOVAX-SEED-Think-14B": (
        {
            **{"architectures": ["HyperCLOVAXForCausalLM"], "attention_bias": False, "attention_multiplier": 0.0078125},
            **{"embedding_multiplier": 10.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 6144},
            **{"intermediate_size": 14336, "logits_scaling": 0.125, "max_position_embeddings": 131072},
            **{"mlp_bias": False, "model_type": "hyperclovax", "num_attention_heads": 48, "num_hidden_layers": 38},
            **{"num_key_value_heads": 8, "residual_multiplier": 1.0, "rms_norm_eps": 1e-05, "rope_scaling": None},
            **{"rope_theta": 100000000, "tie_word_embeddings": False, "use_post_norm": True, "vocab_size": 110592},
        },
        14_748_112_896,
    ),
    "Jais-2-8B": (
        {
            **{"architectures": ["Jais2ForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "relu2"},
            **{"hidden_size": 3328, "intermediate_size": 26624, "layer_norm_eps": 1e-05, "mlp_bias": True},
            **{"max_position_embeddings": 8192, "model_type": "jais2", "num_attention_heads": 26},
            **{"num_hidden_layers": 32, "num_key_value_heads": 26},
            **{"tie_word_embeddings": False, "vocab_size": 150272},
        },
        8_090_401_280,
    ),
    "Hunyuan-1.8B": (
        {
            **{"architectures": ["HunYuanDenseV1ForCausalLM"], "attention_bias": False, "head_dim": 128},
            **{"hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "mlp_bias": False},
            **{"max_position_embeddings": 262144, "num_attention_heads": 16, "num_hidden_layers": 32},
            **{"num_key_value_heads": 4, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "tie_word_embeddings": True},
            "rope_scaling": {
                **{"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0},
                **{"mscale_all_dim": 0.0, "type": "dynamic"},
            },
            **{"use_cla": False, "use_qk_norm": True, "vocab_size": 120818},
        },
        1_791_080_448,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            **{"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu"},
            **{"hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192},
            **{"max_window_layers": 21, "moe_intermediate_size": 1408, "norm_topk_prob": False},
            **{"num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24},
            **{"num_key_value_heads": 16, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0},
            **{"shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": False},
            **{"use_sliding_window": False, "vocab_size": 151936},
        },
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        {
            **{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1},
            **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144},
            **{"max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": []},
            **{"moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128},
            **{"num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06},
            **{"rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False},
            **{"use_sliding_window": False, "vocab_size": 151936},
        },
        30_532_122_624,
    ),
    "Mellum2-12B-A2.5B": (
        {
            **{"architectures": ["MellumForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu"},
            **{"hidden_size": 2304, "intermediate_size": 7168, "max_position_embeddings": 131072},
            **{"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 7, "max_window_layers": 0},
            **{"mlp_layer_types": ["sparse"] * 28, "moe_intermediate_size": 896, "norm_topk_prob": True},
            **{"num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28},
            **{"num_key_value_heads": 4, "rms_norm_eps": 1e-06, "sliding_window": 1024, "tie_word_embeddings": False},
            **{"use_sliding_window": True, "vocab_size": 98304},
            "rope_parameters": {
                "full_attention": {
                    **{"attention_factor": 1.2772588722239782, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0},
                    **{"original_max_position_embeddings": 8192, "rope_theta": 500000.0, "rope_type": "yarn"},
                },
                "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
            },
        },
        12_149_923_072,
    ),
    "North-Mini-Code-1.0": (
        {
            **{"architectures": ["Cohere2MoeForCausalLM"], "expert_selection_fn": "sigmoid"},
            **{"first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 768},
            **{
                "layer_norm_eps": 1e-05,
                "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 12 + ["full_attention"],
            },
            **{"max_position_embeddings": 500000, "norm_topk_prob": False, "num_attention_heads": 32},
            **{"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 49, "num_key_value_heads": 4},
            **{"num_shared_experts": 0, "prefix_dense_intermediate_size": 3072, "rms_norm_eps": 1e-06},
            **{"prefix_dense_sliding_window_pattern": 1, "rope_theta": 50000, "sliding_window": 4096},
            **{"tie_word_embeddings": None, "use_parallel_block": True, "use_qk_norm": False, "vocab_size": 262144},
        },
        30_484_303_872,
    ),
    "gemma-2b": (
        {
            **{"architectures": ["GemmaForCausalLM"], "attention_bias": False, "head_dim": 256, "hidden_act": "gelu"},
            **{"hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192},
            **{"num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "rms_norm_eps": 1e-06},
            **{"rope_scaling": None, "rope_theta": 10000.0, "vocab_size": 256000},
        },
        2_506_172_416,
    ),
    "gemma-2-2b": (
        {
            **{"architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": 50.0},
            **{"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh"},
            **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216},
            **{"max_position_embeddings": 8192, "num_attention_heads": 8, "num_hidden_layers": 26},
            **{"num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0},
            **{"sliding_window": 4096, "vocab_size": 256000},
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            **{"architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None},
            **{"final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
            **{"hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768},
            **{"num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1},
            **{"query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000},
            **{"rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6},
            **{"vocab_size": 262144},
        },
        999_885_952,
    ),
    "gemma-3-4b": (  # the text model alone
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "text_config": {
                **{"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024},
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            },
            "vision_config": {"num_hidden_layers": 27, "vision_use_head": False},
        },
        3_880_263_168,
    ),
    "gemma-3n-E2B": (  # the text model alone
        {
            **{"architectures": ["Gemma3nForConditionalGeneration"], "eos_token_id": [1, 106]},
            "text_config": {
                "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
                **{"altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4},
                **{"final_logit_softcapping": 30.0, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh"},
                **{"hidden_size": 2048, "hidden_size_per_layer_input": 256, "intermediate_size": [8192] * 30},
                **{"laurel_rank": 64, "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6},
                **{"max_position_embeddings": 32768, "num_attention_heads": 8, "num_hidden_layers": 30},
                **{"num_key_value_heads": 2, "num_kv_shared_layers": 10, "rms_norm_eps": 1e-06},
                **{"rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0},
                **{"sliding_window": 512, "vocab_size": 262400, "vocab_size_per_layer_input": 262144},
            },
            "vision_config": {"hidden_size": 2048},
        },
        4_435_182_688,
    ),
    "gemma-3n-E4B": (  # whose settings are the default ones
        {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": {}, "vision_config": {}},
        6_835_235_568,
    ),
    "opt-125m": (
        {
            **{"_remove_final_layer_norm": False, "activation_function": "relu", "architectures": ["OPTForCausalLM"]},
            **{"do_layer_norm_before": True, "ffn_dim": 3072, "hidden_size": 768, "max_position_embeddings": 2048},
            **{"num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272, "word_embed_proj_dim": 768},
        },
        125_239_296,
    ),
    "opt-350m": (
        {
            **{"_remove_final_layer_norm": False, "activation_function": "relu", "architectures": ["OPTForCausalLM"]},
            **{"do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024, "max_position_embeddings": 2048},
            **{"num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 512},
        },
        331_196_416,
    ),
    "Phi-3-mini-4k": (
        {
            **{"architectures": ["Phi3ForCausalLM"], "attention_bias": False, "hidden_act": "silu"},
            **{"hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32},
            **{"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_scaling": None},
            **{"rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False, "vocab_size": 32064},
        },
        3_821_079_552,
    ),
    "gpt2": (
        {
            **{"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "layer_norm_epsilon": 1e-05},
            **{"n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257},
        },
        124_439_808,
    ),
    "SmolLM3-3B": (
        {
            **{"architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_act": "silu"},
            **{"hidden_size": 2048, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36},
            **{
                "max_position_embeddings": 65536,
                "max_window_layers": 28,
                "mlp_bias": False,
                "no_rope_layer_interval": 4,
            },
            **{"no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36},
            **{"num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None},
            **{"rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256},
        },
        3_075_098_624,
    ),
    "OLMo-2-7B": (
        {
            **{"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 4096},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06},
            **{"rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False, "vocab_size": 100352},
        },
        7_298_617_344,
    ),
    "OLMoE-1B-7B-0924": (
        {
            **{"architectures": ["OlmoeForCausalLM"], "attention_bias": False, "clip_qkv": None, "hidden_act": "silu"},
            **{"hidden_size": 2048, "intermediate_size": 1024, "max_position_embeddings": 4096},
            **{"norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8},
            **{"num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
            **{"tie_word_embeddings": False, "vocab_size": 50304},
        },
        6_919_161_856,
    ),
    "Olmo-3-7B": (
        {
            **{"architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 65536},
            **{"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "num_attention_heads": 32},
            **{"num_hidden_layers": 32, "num_key_value_heads": 32, "rms_norm_eps": 1e-06, "rope_theta": 500000},
            "rope_scaling": {
                **{"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0},
                **{"original_max_position_embeddings": 8192, "rope_type": "yarn"},
            },
            **{"sliding_window": 4096, "tie_word_embeddings": False, "vocab_size": 100278},
        },
        7_298_011_136,
    ),
    "granite-3.1-2b": (
        {
            **{"architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625},
            **{"embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192},
            **{"logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 32},
            **{"num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05},
            **{"rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": True, "vocab_size": 49155},
        },
        2_533_531_648,
    ),
    "granite-3.1-1b-a400m": (
        {
            **{"architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625},
            **{"embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 512},
            **{"logits_scaling": 6.0, "max_position_embeddings": 131072, "num_attention_heads": 16},
            **{"num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32},
            **{"residual_multiplier": 0.22, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1500000},
            **{"tie_word_embeddings": True, "vocab_size": 49155},
        },
        1_334_628_352,
    ),
    "granite-4.0-350m": (
        {
            **{"architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False},
            **{"attention_multiplier": 0.015625, "embedding_multiplier": 12, "hidden_act": "silu"},
            **{"hidden_size": 1024, "intermediate_size": 2048, "layer_types": ["attention"] * 28},
            **{"logits_scaling": 4, "mamba_chunk_size": 256, "max_position_embeddings": 32768},
            **{"normalization_function": "rmsnorm", "num_attention_heads": 16, "num_experts_per_tok": 0},
            **{"num_hidden_layers": 28, "num_key_value_heads": 4, "num_local_experts": 0},
            **{"position_embedding_type": "rope", "residual_multiplier": 0.263, "rms_norm_eps": 1e-05},
            **{"rope_scaling": None, "rope_theta": 10000000, "shared_intermediate_size": 2048},
            **{"tie_word_embeddings": True, "vocab_size": 100352},
        },
        352_379_904,
    ),
    "granite-4.0-h-350m": (
        {
            **{"architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.015625},
            **{"embedding_multiplier": 12, "hidden_act": "silu", "hidden_size": 768, "logits_scaling": 3},
            "layer_types": ["attention" if layer in (10, 13, 17, 27) else "mamba" for layer in range(32)],
            **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32},
            **{"mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48},
            **{"mamba_proj_bias": False, "max_position_embeddings": 32768, "num_attention_heads": 12},
            **{"num_experts_per_tok": 0, "num_hidden_layers": 32, "num_key_value_heads": 4, "num_local_experts": 0},
            **{"intermediate_size": 2048, "position_embedding_type": "nope", "residual_multiplier": 0.246},
            **{"rms_norm_eps": 1e-05, "shared_intermediate_size": 2048, "tie_word_embeddings": True},
            "vocab_size": 100352,
        },
        340_332_224,
    ),
    "Nemotron-Nano-9B-v2": (
        {
            **{"architectures": ["NemotronHForCausalLM"], "attention_bias": False, "attention_head_dim": 128},
            **{"chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_size": 4480},
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
            **{
                "intermediate_size": 15680,
                "layer_norm_epsilon": 1e-05,
                "mamba_head_dim": 80,
                "mamba_hidden_act": "silu",
            },
            **{"mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 131072, "mlp_bias": False},
            **{"mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 40, "num_hidden_layers": 56},
            **{"num_key_value_heads": 8, "ssm_state_size": 128, "tie_word_embeddings": False, "use_bias": False},
            **{"time_step_limit": [0.0, float("inf")], "use_conv_bias": True, "vocab_size": 131072},
        },
        8_888_227_328,
    ),
    "Bamba-9B": (
        {
            **{"architectures": ["BambaForCausalLM"], "attn_layer_indices": [9, 18, 27], "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 14336, "mamba_d_conv": 4, "mamba_d_head": 64},
            **{"mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128},
            **{"max_position_embeddings": 262144, "num_attention_heads": 32, "num_hidden_layers": 32},
            **{"num_key_value_heads": 8, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "vocab_size": 128256},
        },
        9_780_235_392,
    ),
    "glm-4-9b-chat": (
        {
            **{"architectures": ["GlmForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 131072},
            **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2},
            **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0},
            **{"tie_word_embeddings": False, "vocab_size": 151552},
        },
        9_399_951_360,
    ),
    "GLM-4-9B-0414": (
        {
            **{"architectures": ["Glm4ForCausalLM"], "attention_bias": True, "head_dim": 128, "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 13696, "max_position_embeddings": 32768},
            **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2},
            **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 10000.0},
            **{"tie_word_embeddings": False, "vocab_size": 151552},
        },
        9_400_279_040,
    ),
    "GLM-4.5-Air": (  # without the layer that predicts further tokens
        {
            **{"architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 1},
            **{"head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944},
            **{"max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128},
            **{"n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8},
            **{"num_hidden_layers": 46, "num_key_value_heads": 8, "num_nextn_predict_layers": 1},
            **{"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000},
            **{"routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False},
            **{"vocab_size": 151552},
        },
        106_852_251_264,
    ),
    "c4ai-command-r-v01": (
        {
            **{"architectures": ["CohereForCausalLM"], "attention_bias": False, "hidden_act": "silu"},
            **{"hidden_size": 8192, "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625},
            **{"max_position_embeddings": 8192, "num_attention_heads": 64, "num_hidden_layers": 40},
            **{"num_key_value_heads": 64, "rope_theta": 8000000.0, "use_qk_norm": False, "vocab_size": 256000},
        },
        34_980_831_232,
    ),
    "c4ai-command-r7b": (
        {
            **{"architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_act": "silu"},
            **{"hidden_size": 4096, "intermediate_size": 14336, "layer_norm_eps": 1e-05, "logit_scale": 0.25},
            **{"max_position_embeddings": 132096, "num_attention_heads": 32, "num_hidden_layers": 32},
            **{"num_key_value_heads": 8, "rope_theta": 50000, "sliding_window": 4096, "sliding_window_pattern": 4},
            **{"use_qk_norm": False, "vocab_size": 256000},
        },
        8_028_033_024,
    ),
    "starcoder2-3b": (
        {
            **{"architectures": ["Starcoder2ForCausalLM"], "hidden_act": "gelu_pytorch_tanh", "hidden_size": 3072},
            **{"intermediate_size": 12288, "max_position_embeddings": 16384, "norm_epsilon": 1e-05},
            **{"num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2},
            **{"rope_theta": 999999.4420358813, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152},
        },
        3_030_371_328,
    ),
    "stablelm-2-1_6b": (
        {
            **{"architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "hidden_size": 2048},
            **{"intermediate_size": 5632, "layer_norm_eps": 1e-05, "max_position_embeddings": 4096},
            **{"num_attention_heads": 32, "num_hidden_layers": 24, "num_key_value_heads": 32},
            **{"partial_rotary_factor": 0.25, "rope_theta": 10000, "tie_word_embeddings": False},
            **{"use_qkv_bias": True, "vocab_size": 100352},
        },
        1_644_515_328,
    ),
    "falcon-7b": (  # without its head, which is the embedding
        {
            **{
                "alibi": False,
                "apply_residual_connection_post_layernorm": False,
                "architectures": ["FalconForCausalLM"],
            },
            **{"bias": False, "hidden_size": 4544, "layer_norm_epsilon": 1e-05, "multi_query": True},
            **{"new_decoder_architecture": False, "num_attention_heads": 71, "num_hidden_layers": 32},
            **{"parallel_attn": True, "vocab_size": 65024},
        },
        6_921_720_704,
    ),
    "falcon-40b": (
        {
            **{"alibi": False, "architectures": ["FalconForCausalLM"], "bias": False, "hidden_size": 8192},
            **{"layer_norm_epsilon": 1e-05, "new_decoder_architecture": True, "num_attention_heads": 128},
            **{"num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True, "vocab_size": 65024},
        },
        41_303_293_952,
    ),
    "pythia-70m": (
        {
            **{"architectures": ["GPTNeoXForCausalLM"], "hidden_act": "gelu", "hidden_size": 512},
            **{"intermediate_size": 2048, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048},
            **{"num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000, "rotary_pct": 0.25},
            **{"tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304},
        },
        70_426_624,
    ),
    "phi-2": (
        {
            **{"architectures": ["PhiForCausalLM"], "hidden_act": "gelu_new", "hidden_size": 2560},
            **{"intermediate_size": 10240, "layer_norm_eps": 1e-05, "max_position_embeddings": 2048},
            **{"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32},
            **{"partial_rotary_factor": 0.4, "qk_layernorm": False, "rope_theta": 10000.0, "vocab_size": 51200},
        },
        2_779_683_840,
    ),
    "bert-base-uncased": (
        {
            **{"architectures": ["BertModel"], "hidden_act": "gelu", "hidden_size": 768, "intermediate_size": 3072},
            **{"layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12},
            **{"num_hidden_layers": 12, "position_embedding_type": "absolute", "type_vocab_size": 2},
            **{"vocab_size": 30522, "pad_token_id": 0, "torch_dtype": "float32"},
        },
        109_482_240 - 590_592,  # without the pooler
    ),
    "distilbert-base-uncased": (
        {
            **{"architectures": ["DistilBertModel"], "activation": "gelu", "dim": 768, "hidden_dim": 3072},
            **{"max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "sinusoidal_pos_embds": False},
            **{"vocab_size": 30522, "pad_token_id": 0, "model_type": "distilbert", "tie_weights_": True},
        },
        66_362_880,
    ),
    "ModernBERT-base": (
        {
            **{"architectures": ["ModernBertModel"], "attention_bias": False, "classifier_pooling": "mean"},
            **{"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "hidden_activation": "gelu"},
            **{"hidden_size": 768, "intermediate_size": 1152, "layer_norm_eps": 1e-5, "local_attention": 128},
            **{"local_rope_theta": 10_000.0, "max_position_embeddings": 8192, "mlp_bias": False, "norm_bias": False},
            **{"norm_eps": 1e-5, "num_attention_heads": 12, "num_hidden_layers": 22, "vocab_size": 50368},
            **{"position_embedding_type": "absolute", "pad_token_id": 50283, "model_type": "modernbert"},
        },
        149_014_272,
    ),
    "EuroBERT-210m": (
        {
            **{"architectures": ["EuroBertModel"], "attention_bias": False, "head_dim": 64, "hidden_act": "silu"},
            **{"hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 8192, "mlp_bias": False},
            **{"num_attention_heads": 12, "num_hidden_layers": 12, "num_key_value_heads": 12, "pretraining_tp": 1},
            **{"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 250_000, "vocab_size": 128_256},
            **{"mask_token_id": 128_002, "tie_word_embeddings": False, "model_type": "eurobert"},
            **{"auto_map": {"AutoModel": "modeling_eurobert.EuroBertModel"}, "torch_dtype": "bfloat16"},
        },
        211_766_016,  # without the head for masked tokens
    ),
    "jina-embeddings-v3-hf": (
        {
            **{"architectures": ["JinaEmbeddingsV3Model"], "hidden_act": "gelu", "hidden_size": 1024},
            **{"intermediate_size": 4096, "layer_norm_eps": 1e-5, "max_position_embeddings": 8194},
            **{"num_attention_heads": 16, "num_hidden_layers": 24, "type_vocab_size": 1, "vocab_size": 250002},
            **{"rope_parameters": {"rope_theta": 20_000.0, "rope_type": "default"}, "pad_token_id": 1},
        },
        558_314_496,  # without the pooler
    ),
    "all-mpnet-base-v2": (
        {
            **{"architectures": ["MPNetModel"], "hidden_act": "gelu", "hidden_size": 768},
            **{"intermediate_size": 3072, "layer_norm_eps": 1e-5, "max_position_embeddings": 514},
            **{"num_attention_heads": 12, "num_hidden_layers": 12, "relative_attention_num_buckets": 32},
            **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "vocab_size": 30527},
        },
        109_486_464 - 590_592,
    ),
    "xlm-roberta-base": (
        {
            **{"architectures": ["XLMRobertaModel"], "hidden_act": "gelu", "hidden_size": 768},
            **{"intermediate_size": 3072, "layer_norm_eps": 1e-5, "max_position_embeddings": 514},
            **{"num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 1, "vocab_size": 250002},
            **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
        },
        278_043_648 - 590_592,
    ),
    "nomic-embed-text-v1.5": (
        {
            **{"architectures": ["NomicBertModel"], "activation_function": "swiglu", "causal": False, "n_embd": 768},
            **{"n_head": 12, "n_inner": 3072, "n_layer": 12, "n_positions": 8192, "max_trained_positions": 2048},
            **{"layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000, "rotary_emb_fraction": 1.0, "vocab_size": 30528},
            **{"mlp_fc1_bias": False, "prenorm": False, "qkv_proj_bias": False, "rotary_scaling_factor": None},
            **{"type_vocab_size": 2, "use_rms_norm": False, "parallel_block": False, "scale_attn_weights": True},
            **{"auto_map": {"AutoModel": "modeling.NomicBertModel"}, "rotary_emb_interleaved": False},
        },
        136_731_648,
    ),
    "embeddinggemma-300m": (
        {
            **{"architectures": ["Gemma3TextModel"], "use_bidirectional_attention": True, "head_dim": 256},
            **{"hidden_activation": "gelu_pytorch_tanh", "hidden_size": 768, "intermediate_size": 1152},
            **{"max_position_embeddings": 2048, "num_attention_heads": 3, "num_hidden_layers": 24},
            **{"num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
            **{"rope_local_base_freq": 10_000.0, "sliding_window": 512, "vocab_size": 262_144},
            **{"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 4},
        },
        302_863_104,
    ),
}


def read(folder: Path, config: Mapping[str, object], generation: object = None) -> ModelDescription:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_model(ModelFolder(folder))


def tiny(**changes: object) -> dict[str, object]:
    return tiny_qwen3_config() | changes


def assert_plain_layers(layers: tuple[LayerSpec, ...], count: int, plain: RopeSpec) -> None:
    """All layers are dense, see everything, and turn as said."""
    assert layers == (LayerSpec(None, layers[0].rope),) * count
    assert layers[0].rope is not None
    assert layers[0].rope.inverse_frequencies == pytest.approx(plain.inverse_frequencies, rel=1e-6)
    assert (layers[0].rope.rotary_dim, layers[0].rope.scale) == (plain.rotary_dim, 1.0)


def test_qwen3_06b_has_the_published_shape(tmp_path: Path) -> None:
    spec = read(tmp_path, QWEN3_06B).spec
    assert (spec.attention.head_dim, spec.hidden_size // spec.attention.num_heads) == (128, 64)
    assert_plain_layers(spec.layers, 28, rope(1_000_000.0, 128))
    assert spec.attention.scale == 128**-0.5
    cache = spec.kv_cache_spec(16, "bfloat16")
    assert cache.groups == (KVGroup(tuple(range(28))),)
    assert cache.bytes_per_token == 28 * 8 * 128 * 2 * 2


def test_llama_32_has_the_published_shape(tmp_path: Path) -> None:
    model = read(tmp_path, LLAMA_32_1B, {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [128001]})
    spec = model.spec
    assert (spec.tied_head, spec.context_length, spec.attention.head_dim) == (True, 131072, 64)
    assert (model.eos_token_ids, model.dtype, model.notices) == ((128001,), "bfloat16", ())
    assert model.generation == GenerationDefaults(temperature=0.6, top_p=0.9)
    assert weight_bytes(spec, "bfloat16") == 2 * 1_235_814_400 + 2 * 33 * 2048  # its parameters; norms in float32
    rotary = spec.layers[0].rope
    assert rotary is not None
    assert rotary.inverse_frequencies[0] == 1.0
    assert rotary.inverse_frequencies[-1] == pytest.approx(500_000 ** (-62 / 64) / 32)


def test_hunyuan_stretches_the_base_of_its_positions_by_alpha(tmp_path: Path) -> None:
    model = read(tmp_path, published("Hunyuan-1.8B"))
    assert_plain_layers(model.spec.layers, 32, rope(10_000.0 * 1000 ** (128 / 126), 128))
    assert (model.notices, model.spec.context_length) == ((), 262144)


def test_layers_of_modern_bert_with_a_window_have_another_base(tmp_path: Path) -> None:
    changes = {"global_rope_theta": 80_000.0, "local_rope_theta": 20_000.0}
    for settings, (full, near) in ((changes, (80_000.0, 20_000.0)), ({}, (160_000.0, 10_000.0))):
        layers = read(tmp_path, published("ModernBERT-base", **settings)).spec.layers
        for index, base in ((0, full), (1, near), (3, full)):
            found = layers[index].rope
            assert found is not None and found.inverse_frequencies[1] == pytest.approx(base ** (-2 / 64))
        assert [layer.attention_norm for layer in layers] == [False, *[True] * 21]


def test_exaone_4_has_32_key_value_heads_unless_its_settings_say_otherwise(tmp_path: Path) -> None:
    without = {name: value for name, value in published("EXAONE-4.0-32B").items() if name != "num_key_value_heads"}
    assert read(tmp_path, {**without, "num_attention_heads": 64}).spec.attention.num_kv_heads == 32


def test_gemma_4_takes_null_for_its_usual_positions(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma4ForCausalLM"]}
    usual = read(tmp_path, config).spec
    assert read(tmp_path, {**config, "rope_parameters": None}).spec == usual


def test_llama_2_has_the_published_shape(tmp_path: Path) -> None:
    model = read(tmp_path, LLAMA_2_7B)
    assert model.spec.attention.num_kv_heads == model.spec.attention.num_heads == 32
    assert_plain_layers(model.spec.layers, 32, rope(10_000.0, 128))
    assert weight_bytes(model.spec, "bfloat16") == 2 * 6_738_415_616 + 2 * 65 * 4096
    assert (model.dtype, model.notices) == ("float16", ())
    assert "model.layers.31.self_attn.rotary_emb.inv_freq" in model.spec.ignored_tensors


def test_transformers_4_and_5_say_the_same_llama(tmp_path: Path) -> None:
    newer = {name: value for name, value in LLAMA_32_1B.items() if name not in ("rope_theta", "rope_scaling")}
    scaling = LLAMA_32_1B["rope_scaling"]
    assert isinstance(scaling, dict)
    newer["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    assert read(tmp_path, newer) == read(tmp_path, LLAMA_32_1B)


# --- the families ---------------------------------------------------------------------------------


def published(name: str, **changes: object) -> dict[str, object]:
    return PUBLISHED[name][0] | changes


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_number_of_parameters(name: str, tmp_path: Path) -> None:
    spec = read(tmp_path, PUBLISHED[name][0]).spec
    assert sum(math.prod(shape) for shape in expected_tensors(spec).values()) == PUBLISHED[name][1]
    assert all(part in spec.sources for part in spec.model_parts())


def family_rows() -> list[str]:
    """Return the rows of the table of families: what each module says of itself, and what calls it."""
    rows = []
    for module in dict.fromkeys(models.FAMILIES.values()):
        title, _, about = str(import_module(module).__doc__).partition("\n\n")[0].replace("\n", " ").partition(": ")
        names = [name for name, home in models.FAMILIES.items() if home == module]
        files = [f"`{name}`" for name, family in ARCHITECTURES.items() if family in names]
        called = ", ".join(f"`{name}`" for name in names)
        rows.append(f"| {title} | {called} | {', '.join(files)} | {about.strip().rstrip('.')} |")
    return sorted(rows, key=str.lower)


def test_the_table_of_families_in_the_documents_is_that_of_the_code() -> None:
    table = "\n".join(["| family | `architectures` | in GGUF | what it has |", "|---|---|---|---|", *family_rows()])
    assert f"{table}\n" in (ROOT / "docs" / "families.md").read_text(encoding="utf-8"), table


def test_the_documents_list_the_tokenizers_that_a_gguf_file_may_contain() -> None:
    text = (ROOT / "docs" / "how-to" / "use-a-model-you-have.md").read_text(encoding="utf-8")
    (row,) = (line for line in text.splitlines() if line.startswith("| tokenizers |"))
    assert SPLITTERS.keys() - set(re.findall(r"[\w.-]+", row)) == set()


def test_every_family_is_listed_and_each_module_is_there() -> None:
    modules = {path.stem for path in Path(models.__file__).parent.glob("*.py")}
    assert {module.rpartition(".")[2] for module in models.FAMILIES.values()} <= modules
    assert {"architectures", *models.FAMILIES} >= {str(c["architectures"][0]) for c, _ in PUBLISHED.values()}  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("Mistral-7B-v0.1", {}, {0: 4096, 31: 4096}),
        ("Mistral-7B-v0.1", {"sliding_window": None}, {0: None, 31: None}),
        ("Mistral-7B-v0.1", {"layer_types": ["sliding_attention"] * 32}, {0: 4096}),
        ("Qwen2.5-0.5B", {}, {0: None, 23: None}),
        ("ModernBERT-base", {}, {0: None, 1: 65, 2: 65, 3: None, 20: 65, 21: None}),
        ("ModernBERT-base", {"global_attn_every_n_layers": 2, "local_attention": 64}, {0: None, 1: 33, 2: None}),
        ("ModernBERT-base", {"layer_types": ["sliding_attention"] * 22}, {0: 65, 21: 65}),
        ("Qwen2.5-0.5B", {"use_sliding_window": True, "max_window_layers": 21}, {20: None, 21: 32768}),
        ("Qwen3-30B-A3B", {}, {0: None, 47: None}),
        (
            "Qwen3-30B-A3B",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": None},
            {0: 9, 47: 9},
        ),
        ("gemma-2-2b", {}, {0: 4096, 1: None, 24: 4096, 25: None}),
        ("gemma-2-2b", {"layer_types": ["full_attention"] * 25 + ["sliding_attention"]}, {0: None, 25: 4096}),
        ("gemma-3-1b", {}, {0: 512, 4: 512, 5: None, 6: 512, 23: None, 25: 512}),
        ("gemma-3-1b", {"sliding_window_pattern": 2}, {0: 512, 1: None, 25: None}),
        ("gemma-3-4b", {}, {4: 1024, 5: None}),
        ("gemma-3n-E2B", {}, {0: 512, 3: 512, 4: None, 20: 512, 29: None}),
        ("LFM3-1.7B", {}, {0: None, 2: None, 4: 256, 6: None, 8: 256, 20: 256, 22: None}),
        ("gemma-3n-E4B", {"text_config": {}}, {0: 512, 4: None, 33: 512, 34: None}),
        ("Phi-3-mini-4k", {}, {0: 2047, 31: 2047}),
        ("Phi-3-mini-4k", {"sliding_window": None}, {0: None}),
        ("SmolLM3-3B", {}, {0: None, 3: None}),
        ("SmolLM3-3B", {"use_sliding_window": True, "sliding_window": 9, "layer_types": None}, {2: None, 3: 9, 35: 9}),
        ("Olmo-3-7B", {}, {0: 4096, 2: 4096, 3: None, 31: None}),
        ("Olmo-3-7B", {"layer_types": None, "sliding_window": 9}, {0: 9, 3: None, 4: 9}),
        ("EXAONE-4.0-32B", {}, {0: 4096, 2: 4096, 3: None, 4: 4096, 63: None}),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": 2, "sliding_window": 9}, {0: 9, 1: None, 2: 9}),
        ("EXAONE-4.0-32B", {"layer_types": ["sliding_attention"] * 64}, {3: 4096}),
        ("EXAONE-4.0-1.2B", {}, {0: None, 29: None}),
        ("c4ai-command-r-v01", {}, {0: None}),
        ("c4ai-command-r7b", {}, {0: 4096, 3: None, 31: None}),
        ("c4ai-command-r7b", {"sliding_window_pattern": 2}, {0: 4096, 1: None}),
        ("starcoder2-3b", {}, {0: 4096, 29: 4096}),
        ("starcoder2-3b", {"sliding_window": None}, {0: None}),
        ("opt-125m", {}, {0: None}),
        ("gpt2", {}, {0: None}),
    ],
)
def test_windows_of_the_families(
    name: str, changes: dict[str, object], windows: dict[int, int | None], tmp_path: Path
) -> None:
    layers = read(tmp_path, published(name, **changes)).spec.layers
    assert {layer: layers[layer].window for layer in windows} == windows


def test_what_published_configs_leave_out(tmp_path: Path) -> None:
    """transformers saves no setting that is that of the class: an older Mistral says nothing of its window."""
    short = {name: value for name, value in PUBLISHED["Mistral-7B-v0.1"][0].items() if name != "sliding_window"}
    assert read(tmp_path, short) == read(tmp_path, PUBLISHED["Mistral-7B-v0.1"][0])
    left_out = ("num_local_experts", "num_experts_per_tok", "rms_norm_eps", "rope_theta", "sliding_window")
    short = {name: value for name, value in PUBLISHED["Mixtral-8x7B-v0.1"][0].items() if name not in left_out}
    assert read(tmp_path, short) == read(tmp_path, PUBLISHED["Mixtral-8x7B-v0.1"][0])
    short = {name: value for name, value in PUBLISHED["SmolLM3-3B"][0].items() if name != "rope_theta"}
    assert read(tmp_path, short) == read(tmp_path, published("SmolLM3-3B", rope_theta=2_000_000.0))
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    short = {name: value for name, value in PUBLISHED["gemma-2-2b"][0].items() if name not in caps}
    assert read(tmp_path, short) == read(tmp_path, PUBLISHED["gemma-2-2b"][0])
    without = read(tmp_path, published("gemma-2-2b", **dict.fromkeys(caps))).spec
    assert (without.attention.score_soft_cap, without.logit_soft_cap) == (None, None)


def test_gemma_3_turns_near_and_far_layers_differently(tmp_path: Path) -> None:
    older = read(tmp_path, published("gemma-3-1b", rope_scaling={"rope_type": "linear", "factor": 8.0})).spec
    newer = {name: value for name, value in published("gemma-3-1b").items() if not name.startswith("rope")}
    newer["rope_parameters"] = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    assert read(tmp_path, newer).spec == older
    near, far = older.layers[0].rope, older.layers[5].rope
    assert near is not None
    assert far is not None
    assert near.inverse_frequencies == pytest.approx(rope(10_000.0, 256).inverse_frequencies)
    assert 8 * np.array(far.inverse_frequencies) == pytest.approx(rope(1_000_000.0, 256).inverse_frequencies)
    groups = older.kv_cache_spec(16).groups
    assert {group.window for group in groups} == {None, 512}


def test_a_multimodal_model_says_why_it_reads_no_images(tmp_path: Path) -> None:
    settings = PUBLISHED["gemma-3-4b"][0]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (notice,) = read_model(ModelFolder(tmp_path)).notices
    assert notice == "a multimodal model without preprocessor_config.json: only its text model is served"
    (notice,) = read_model(ModelFolder(tmp_path), images=False).notices
    assert notice == "a multimodal model: only its text model is served"


def test_gemma_3_with_an_eye_is_served_as_text(tmp_path: Path) -> None:
    model = read(tmp_path, PUBLISHED["gemma-3-4b"][0])
    spec = model.spec
    assert (model.eos_token_ids, spec.vocab_size, spec.context_length) == ((1, 106), 262208, 131072)
    assert model.notices == (NO_SETTINGS,)
    assert "language_model.model.layers.33.mlp.up_proj.weight" in expected_tensors(spec)
    assert "language_model.lm_head.weight" in spec.ignored_tensors
    assert spec.ignored_prefixes == ("multi_modal_projector.", "vision_tower.")
    newer = published("gemma-3-4b", eos_token_id=None)
    newer["text_config"] = {**newer["text_config"], "eos_token_id": 1}  # type: ignore[dict-item]
    assert read(tmp_path, newer).eos_token_ids == (1,)


def test_gemma_3n_is_served_as_text(tmp_path: Path) -> None:
    model = read(tmp_path, PUBLISHED["gemma-3n-E2B"][0])
    spec = model.spec
    assert (model.eos_token_ids, spec.vocab_size, spec.tied_head) == ((1, 106), 262400, True)
    assert model.notices == (TEXT_ONLY,)
    assert spec.layer_inputs is not None and spec.layer_inputs.num_tokens == 262144
    assert [layer.keys_of for layer in spec.layers[19:25]] == [None, 18, 18, 18, 18, 19]
    thresholds = [layer.gate_threshold for layer in spec.layers]
    assert thresholds == [pytest.approx(1.6448536)] * 10 + [None] * 20
    names = expected_tensors(spec)
    assert names["model.language_model.altup_unembed_projections.2.weight"] == (2048, 2048)
    assert "model.language_model.layers.20.self_attn.k_proj.weight" in spec.ignored_tensors - names.keys()
    text = PUBLISHED["gemma-3n-E2B"][0]["text_config"]
    assert isinstance(text, dict)
    alone = {**text, "architectures": ["Gemma3nForCausalLM"], "eos_token_id": [1, 106]}
    assert (read(tmp_path, alone).spec.layers, read(tmp_path, alone).notices) == (spec.layers, ())


def test_queries_of_ministral_3_grow_with_their_position(tmp_path: Path) -> None:
    model = read(tmp_path, PUBLISHED["Ministral-3-3B"][0])
    spec, rope = model.spec, model.spec.layers[0].rope
    assert rope is not None
    assert (rope.query_growth, rope.growth_length) == (float(np.float32(0.1)), 16384)
    assert (rope.scale, spec.context_length, model.dtype) == (1.0, 262144, "bfloat16")
    assert model.notices == (NO_SETTINGS,)
    text = PUBLISHED["Ministral-3-3B"][0]["text_config"]
    assert isinstance(text, dict)
    alone = {**text, "architectures": ["Ministral3ForCausalLM"]}
    assert read(tmp_path, alone).spec.layers == spec.layers
    del alone["rope_parameters"]
    assert read(tmp_path, alone).spec.layers == spec.layers
    with pytest.raises(CheckpointError, match=r"query growth is 0\.5; allowed: 0 in a model with latents"):
        replace(SPECS["latent"], layers=SPECS["growing"].layers[:1])


def test_layers_of_llama_4_without_positions_have_queries_that_grow(tmp_path: Path) -> None:
    def alone(**settings: object) -> dict[str, object]:
        text = PUBLISHED["Llama-4-Scout"][0]["text_config"]
        assert isinstance(text, dict)
        return {**text, "architectures": ["Llama4ForCausalLM"], **settings}

    model = read(tmp_path, PUBLISHED["Llama-4-Scout"][0])
    spec = model.spec
    assert model.notices == (TEXT_ONLY,)  # its images are not read
    assert spec.layers == read(tmp_path, alone()).spec.layers
    near, whole = spec.layers[2:4]
    assert (near.window, near.head_norms, near.sparse, spec.attention.chunked) == (8192, True, True, True)
    assert whole == LayerSpec(
        None, RopeSpec(0, (), 1.0, float(np.float32(0.1)), 8192, 1), sparse=True, head_norms=False
    )
    plain = read(tmp_path, alone(attn_temperature_tuning=False, use_qk_norm=False, moe_layers=[])).spec
    assert (plain.layers[3], plain.experts) == (LayerSpec(None, None, head_norms=False), None)
    every = read(tmp_path, alone(no_rope_layers=[1] * 48, layer_types=["full_attention"] * 48)).spec
    assert {(layer.window, layer.rope == near.rope) for layer in every.layers} == {(None, True)}
    for changes, message in (
        ({"no_rope_layers": [1]}, "a list of 0 and 1 for 48 layers"),
        ({"layer_types": ["chunked_attention"]}, "48 of full_attention, chunked_attention"),
        ({"moe_layers": [48]}, "a list of integers from 0 to 47"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path, alone(**changes))
    with pytest.raises(CheckpointError, match="chunks is 'in an encoder'; allowed: windows"):
        replace(spec, attention=replace(spec.attention, bidirectional=True))


def test_experts_of_ernie_are_in_a_range_of_layers(tmp_path: Path) -> None:
    def sparse(**settings: object) -> list[int]:
        layers = read(tmp_path, published("ERNIE-4.5-21B-A3B", **settings)).spec.layers
        return [index for index, layer in enumerate(layers) if layer.sparse]

    assert sparse() == sparse(moe_layer_end_index=-1) == sparse(moe_layer_end_index=27) == [*range(1, 28)]
    assert sparse(moe_layer_start_index=3, moe_layer_end_index=8) == [3, 4, 5, 6, 7, 8]
    assert sparse(moe_layer_start_index=20, moe_layer_interval=3) == [20, 23, 26]
    spec = read(tmp_path, PUBLISHED["ERNIE-4.5-21B-A3B"][0]).spec
    assert spec.attention.head_dim == 128
    assert "model.mtp_block.0.mlp.up_proj.weight".startswith(spec.ignored_prefixes)


def test_positions_of_phimoe_have_a_scale_for_short_and_for_long_texts(tmp_path: Path) -> None:
    for max_length, factor, scale in ((None, 2.5, 1.243163121016122), (8192, 2.5, 1.243163121016122), (4096, 1.1, 1.1)):
        (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Phi-3.5-MoE"][0]))
        model = read_model(ModelFolder(tmp_path), max_length)
        rope = model.spec.layers[0].rope
        assert rope is not None
        assert rope.inverse_frequencies[1] == pytest.approx(10_000 ** (-2 / 128) / factor)
        assert rope.scale == pytest.approx(scale)
        kind = "short" if max_length == 4096 else "long"
        assert model.notices == (
            f"rope scaling 'longrope' depends on the current length: frozen at load, by its {kind} factors for "
            f"{max_length or 131072} tokens",
        )
    experts = model.spec.experts
    assert experts is not None
    assert (experts.margin, experts.normalize_weights) == (0.02, False)
    for field in ({"router_jitter_noise": 0.3}, {"router_jitter_noise": None}):
        spec = read(tmp_path, published("Phi-3.5-MoE", **field)).spec
        assert spec.experts is not None
        assert spec.experts.margin == (0.6 if field["router_jitter_noise"] else 0.02)


def test_a_sparse_mixer_has_no_rules_of_other_routers() -> None:
    experts = SPECS["mixed-experts"].experts
    assert experts is not None
    for changes in ({"normalize_weights": True}, {"offset": True}, {"num_groups": 2, "groups_per_token": 2}):
        with pytest.raises(CheckpointError, match="experts of a sparse mixer is 'sums, offsets or groups'; allowed"):
            replace(SPECS["mixed-experts"], experts=replace(experts, **changes))


def test_weights_of_experts_of_qwen3_vl_add_up_to_one(tmp_path: Path) -> None:
    name = "Qwen3-VL-30B-A3B"
    text = PUBLISHED[name][0]["text_config"]
    assert isinstance(text, dict)
    assert (
        read(tmp_path, PUBLISHED[name][0]).spec
        == read(
            tmp_path, published(name, text_config={field: text[field] for field in text if field != "norm_topk_prob"})
        ).spec
    )
    with pytest.raises(CheckpointError, match="norm_topk_prob is False; allowed: true"):
        read(tmp_path, published(name, text_config={**text, "norm_topk_prob": False}))


def test_positions_of_a_text_in_qwen_vl_are_those_of_qwen(tmp_path: Path) -> None:
    flat = PUBLISHED["Qwen2.5-VL-3B"][0]
    model = read(tmp_path, flat)
    assert model.notices == (NO_SETTINGS,)
    plain = {**flat, "architectures": ["Qwen2ForCausalLM"], "rope_scaling": None, "vision_config": None}
    layers = [replace(layer, rope=layer.rope and replace(layer.rope, axes=())) for layer in model.spec.layers]
    without_axes = replace(model.spec, layers=tuple(layers))
    assert without_axes == replace(read(tmp_path, plain).spec, ignored_prefixes=("visual.",))
    assert {layer.rope and layer.rope.axes for layer in model.spec.layers} == {(0,) * 16 + (1,) * 24 + (2,) * 24}
    for sections in ([16, 24], [16, 24, 23], [16, 24, "24"], "mrope"):
        with pytest.raises(CheckpointError, match="mrope_section"):
            read(tmp_path, published("Qwen2.5-VL-3B", rope_scaling={"type": "mrope", "mrope_section": sections}))
    nested = {"architectures": flat["architectures"], "vision_config": {}, "text_config": flat}
    assert read(tmp_path, nested).spec == model.spec
    newer = read(tmp_path, PUBLISHED["Qwen3-VL-4B"][0])
    assert newer.spec.layers[0].rope is not None
    assert newer.spec.layers[0].rope.inverse_frequencies[-1] == pytest.approx(5e6 ** (-126 / 128))
    assert (newer.dtype, newer.eos_token_ids) == ("bfloat16", (151645,))
    assert "model.language_model.layers.35.self_attn.q_norm.weight" in expected_tensors(newer.spec)
    text = PUBLISHED["Qwen3-VL-4B"][0]["text_config"]
    assert isinstance(text, dict)
    with pytest.raises(CheckpointError, match="use_sliding_window is True; allowed: false"):
        read(tmp_path, published("Qwen3-VL-4B", text_config={**text, "use_sliding_window": True}))


@pytest.mark.parametrize(
    ("inner", "outer", "is_tied"),
    [
        *((None, None, False), (True, None, True), (None, True, True), (True, True, True), (False, True, False)),
        *((True, False, False), (False, None, False), (None, False, False)),
    ],
)
def test_a_multimodal_model_has_a_tied_head_if_no_config_denies_it(
    inner: bool | None, outer: bool | None, is_tied: bool, tmp_path: Path
) -> None:
    config = published("Mistral-Small-3.2-24B", tie_word_embeddings=outer)
    config["text_config"] = {**config["text_config"], "tie_word_embeddings": inner}  # type: ignore[dict-item]
    spec = read(tmp_path, config).spec
    assert spec.tied_head is is_tied
    assert ("language_model.lm_head.weight" in expected_tensors(spec)) is not is_tied


def test_experts_of_qwen3_moe(tmp_path: Path) -> None:
    spec = read(tmp_path, published("Qwen3-30B-A3B", decoder_sparse_step=2, mlp_only_layers=[3, 47])).spec
    assert [index for index, layer in enumerate(spec.layers) if layer.sparse] == [1, *range(5, 47, 2)]
    config = published("Qwen3-30B-A3B")
    newer = {name: value for name, value in config.items() if name != "num_experts"} | {"num_local_experts": 128}
    assert read(tmp_path, newer) == read(tmp_path, config)
    assert "model.layers.47.mlp.experts.127.down_proj.weight" in expected_tensors(read(tmp_path, config).spec)


def test_phi_3_stretches_by_the_factors_for_the_length(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 48, "long_factor": [1.0 + index for index in range(48)]}
    long = published("Phi-3-mini-4k", max_position_embeddings=131072, rope_scaling={"type": "su", **factors})
    description = read(tmp_path, long)
    assert description.notices[0].endswith("by its long factors for 131072 tokens")
    assert (
        read_model(ModelFolder(tmp_path), max_length=4096).notices[0].endswith("by its short factors for 4096 tokens")
    )
    rotary = description.spec.layers[0].rope
    assert rotary is not None
    assert rotary.inverse_frequencies[1] == pytest.approx(10_000 ** (-2 / 96) / 2)
    assert rotary.scale == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    part = read(tmp_path, published("Phi-3-mini-4k", partial_rotary_factor=0.75)).spec.layers[0].rope
    assert part is not None
    assert part.rotary_dim == 72
    assert expected_tensors(description.spec)["model.layers.0.self_attn.qkv_proj.weight"] == (9216, 3072)


def test_gpt2_and_opt_in_other_forms(tmp_path: Path) -> None:
    bare = read(tmp_path, published("opt-125m", enable_bias=False, tie_word_embeddings=False)).spec
    assert (bare.attention.bias, bare.attention.output_bias, bare.mlp.bias) == (False, False, False)
    assert expected_tensors(bare)["lm_head.weight"] == (50272, 768)
    assert not read(tmp_path, published("opt-125m", _remove_final_layer_norm=True)).spec.final_norm
    other = published(
        "gpt2", n_inner=99, scale_attn_weights=False, tie_word_embeddings=False, activation_function="relu"
    )
    spec = read(tmp_path, other).spec
    assert (spec.mlp.intermediate_size, spec.mlp.activation, spec.attention.scale) == (99, Activation.RELU, 1.0)
    assert expected_tensors(spec)["lm_head.weight"] == (50257, 768)
    assert "transformer.h.11.attn.bias" in spec.ignored_tensors


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mistral-7B-v0.1", {"layer_types": ["full_attention"] * 32}, "allowed: null, or sliding_attention for all"),
        ("Mistral-7B-v0.1", {"hidden_act": "quick_gelu"}, "hidden_act is 'quick_gelu'; allowed: one of silu, swish"),
        ("Mistral-7B-v0.1", {"sliding_window": 0}, "sliding_window is 0; allowed: an integer from 1"),
        ("Qwen2.5-0.5B", {"use_mrope": True}, "use_mrope is True; allowed: false"),
        ("Qwen2.5-0.5B", {"layer_types": ["sliding_attention"] * 24}, "a window size for sliding layers"),
        ("Qwen3-30B-A3B", WINDOWS, "max_window_layers is 48; allowed: 0 or null with a sliding window"),
        (
            "Qwen3-30B-A3B",
            {"mlp_only_layers": [48]},
            "mlp_only_layers is [48]; allowed: a list of integers from 0 to 47",
        ),
        ("Qwen3-30B-A3B", {"mlp_only_layers": 1}, "mlp_only_layers is 1; allowed: a list of integers from 0 to 47"),
        ("Qwen3-30B-A3B", {"num_experts": 4}, "num_experts_per_tok is 8; allowed: an integer from 1 to 4"),
        ("gemma-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; allowed: false"),
        (
            "OLMoE-1B-7B-0924",
            {"clip_qkv": 8.0},
            "clip_qkv is 8.0; allowed: null: no queries, keys and values are clipped",
        ),
        ("OLMoE-1B-7B-0924", {"num_experts": 0}, "num_experts is 0; allowed: an integer from 1"),
        (
            "Qwen1.5-MoE-A2.7B",
            {"use_sliding_window": True},
            "layer_types is None; allowed: a list of layer types with a",
        ),
        ("gemma-2b", {"hidden_act": "silu"}, "hidden_act is 'silu'; allowed: 'gelu' or 'gelu_pytorch_tanh' or null"),
        (
            "gemma-2b",
            {"hidden_activation": "gelu"},
            "hidden_activation is 'gelu'; allowed: 'gelu_pytorch_tanh' or null",
        ),
        ("gemma-2-2b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; allowed: false"),
        ("gemma-2-2b", {"hidden_activation": "quick_gelu"}, "hidden_activation is 'quick_gelu'; allowed: one of silu"),
        ("gemma-2-2b", {"final_logit_softcapping": 0}, "final_logit_softcapping is 0; allowed: a number above 0"),
        ("gemma-2-2b", {"sliding_window": None}, "sliding_window is None; allowed: an integer"),
        ("gemma-3-1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True; allowed: false"),
        (
            "gemma-3-1b",
            {"rope_parameters": {"rope_theta": 1e6}},
            "allowed: settings for full_attention and for sliding",
        ),
        (
            "gemma-3-1b",
            {"rope_parameters": {"full_attention": {}, "sliding_attention": {}}, "rope_scaling": {"factor": 8.0}},
            "and no rope_scaling",
        ),
        (
            "gemma-3-4b",
            {"tie_word_embeddings": False},
            "tie_word_embeddings is False; allowed: null, or the value in text_config",
        ),
        ("gemma-3-4b", {"text_config": 3}, "text_config is 3; allowed: an object"),
        ("LFM3-1.7B", {"attention_bias": True}, "attention_bias is True; allowed: false"),
        ("LFM3-1.7B", {"conv_bias": True}, "conv_bias is True; allowed: false"),
        ("LFM3-1.7B", {"sliding_window": None}, "sliding_window is None; allowed: an integer"),
        ("LFM3-1.7B", {"layer_types": ["conv"] * 23}, "allowed: 24 of full_attention, sliding_attention, conv"),
        *(
            ("gemma-3n-E4B", {"text_config": settings}, message)
            for settings, message in (
                ({"altup_num_inputs": 2}, "altup_num_inputs is 2; allowed: 4, as in the published models"),
                ({"altup_active_idx": 1}, "altup_active_idx is 1; allowed: 0, as in the published models"),
                (
                    {"activation_sparsity_pattern": [0.5]},
                    "allowed: a number from 0 to below 1 for each of the 35 layers",
                ),
                ({"activation_sparsity_pattern": [1.0] * 35}, "allowed: a number from 0 to below 1 for each of the 35"),
                ({"intermediate_size": [8192]}, "is [8192]; allowed: a size, or one for each of the 35 layers"),
                ({"intermediate_size": ["8192"] * 35}, "intermediate_size is '8192'; allowed: an integer"),
                ({"num_kv_shared_layers": 35}, "num_kv_shared_layers is 35; allowed: an integer from 0 to 34"),
                ({"hidden_size_per_layer_input": 0}, "AltUp is 'without inputs of layers, or with scales'; allowed"),
                ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True; allowed: false"),
            )
        ),
        (
            "Mistral-Small-3.2-24B",
            {"text_config": {"model_type": "mistral4"}},
            "text_config: model_type is 'mistral4'; allowed: 'ministral3' or 'mistral' or null",
        ),
        ("bert-base-uncased", {"is_decoder": True}, "is_decoder is True; allowed: false"),
        ("bert-base-uncased", {"position_embedding_type": "relative_key"}, "is 'relative_key'; allowed: 'absolute'"),
        ("all-mpnet-base-v2", {"relative_attention_num_buckets": 64}, "num_buckets is 64; allowed: 32"),
        ("ModernBERT-base", {"head_dim": 32}, "head_dim is 32; allowed: 64, the hidden size divided by"),
        ("ModernBERT-base", {"local_rope_theta": None}, "local_rope_theta is None; allowed: a number"),
        ("ModernBERT-base", {"rope_scaling": {"factor": 2.0}}, "and no rope_scaling"),
        ("EuroBERT-210m", {"pretraining_tp": 2}, "pretraining_tp is 2; allowed: 1"),
        (
            "EuroBERT-210m",
            {"architectures": ["EuroBertForSequenceClassification"], "classifier_pooling": "max"},
            "classifier_pooling is 'max'; allowed: 'bos' or 'late' or 'mean'",
        ),
        ("jina-embeddings-v3-hf", {"head_dim": 32}, "head_dim is 32; allowed: 64, the hidden size divided by"),
        ("distilbert-base-uncased", {"activation": "tanh"}, "hidden_act is 'tanh'; allowed: one of silu"),
        ("xlm-roberta-base", {"max_position_embeddings": 2}, "is 2; allowed: more than the 2 rows without a position"),
        ("nomic-embed-text-v1.5", {"prenorm": True}, "prenorm is True; allowed: false"),
        ("nomic-embed-text-v1.5", {"num_experts": 8}, "num_experts is 8; allowed: null"),
        ("nomic-embed-text-v1.5", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction is 0.5; allowed: 1"),
        ("embeddinggemma-300m", {"use_bidirectional_attention": None}, "is None; allowed: true in a model without"),
        ("opt-125m", {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine is False; allowed: true"),
        ("opt-125m", {"activation_function": "tanh"}, "activation_function is 'tanh'; allowed: one of silu"),
        ("opt-125m", {"num_attention_heads": 13}, "hidden_size is 768; allowed: a multiple of the 13 heads"),
        (
            "Phi-3-mini-4k",
            {"rope_scaling": {"type": "yarn"}},
            "type is 'yarn'; allowed: 'default' or 'longrope' or 'su'",
        ),
        (
            "Phi-3-mini-4k",
            {"rope_scaling": {"rope_type": "longrope"}, "original_max_position_embeddings": None},
            "original_max_position_embeddings is None; allowed: an integer",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True; allowed: false"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True; allowed: false"),
        ("gpt2", {"n_head": 13}, "n_embd is 768; allowed: a multiple of the 13 heads"),
        ("gpt-oss-20b", {"swiglu_limit": 8.0}, "swiglu_limit is 8.0; allowed: 7"),
        ("gpt-oss-20b", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5; allowed: 1.702"),
        ("gpt-oss-20b", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu' or null"),
        ("gpt-oss-20b", {"num_experts_per_tok": 33}, "num_experts_per_tok is 33; allowed: an integer from 1 to 32"),
        ("DeepSeek-V2-Lite", {"norm_topk_prob": True}, "norm_topk_prob is True; allowed: false"),
        ("DeepSeek-V2-Lite", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; allowed: 'softmax' or null"),
        ("DeepSeek-V2-Lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; allowed: 'greedy' or"),
        ("DeepSeek-V2-Lite", {"moe_layer_freq": 2}, "moe_layer_freq is 2; allowed: 1"),
        ("DeepSeek-V2-Lite", {"num_key_value_heads": 4}, "num_key_value_heads is 4; allowed: 16"),
        ("DeepSeek-V2-Lite", {"kv_lora_rank": 500}, "config.json: latent rank is 500; allowed: a multiple of 16"),
        ("DeepSeek-V3", {"topk_group": 9}, "config.json: groups per token is 9; allowed: from 1 to 8"),
        ("DeepSeek-V2-Lite", {"qk_rope_head_dim": 8}, "latent rope_dim is 8; allowed: a multiple of 16"),
        ("DeepSeek-V2-Lite", {"kv_lora_rank": 2**20}, "kv_lora_rank is 1048576; allowed: an integer from 1 to 2048"),
        ("DeepSeek-V2", {"n_group": 7}, "groups of experts is 7; allowed: a divisor of 160"),
        ("DeepSeek-V2", {"topk_group": 9}, "groups per token is 9; allowed: from 1 to 8"),
        ("DeepSeek-V2", {"n_shared_experts": 2**20}, "n_shared_experts is 1048576; allowed: MLPs of 1536 numbers that"),
        ("DeepSeek-V3", {"topk_method": "greedy"}, "topk_method is 'greedy'; allowed: 'noaux_tc' or null"),
        ("DeepSeek-V3", {"num_nextn_predict_layers": 99}, "num_nextn_predict_layers is 99; allowed: an integer"),
        ("ERNIE-4.5-21B-A3B", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1; allowed: at most 1e-12"),
        ("ERNIE-4.5-21B-A3B", {"moe_layer_end_index": [9, 9]}, "moe_layer_end_index is [9, 9]; allowed: an integer"),
        ("ERNIE-4.5-21B-A3B", {"moe_num_shared_experts": 2**20}, "is 1048576; allowed: MLPs of 1536 numbers that"),
        ("ERNIE-4.5-21B-A3B", {"moe_k": 65}, "moe_k is 65; allowed: an integer from 1 to 64"),
        (
            "Phi-3.5-MoE",
            {"num_experts_per_tok": 3},
            "num_experts_per_tok is 3; allowed: 2, as the sparse mixer chooses",
        ),
        ("Phi-3.5-MoE", {"num_local_experts": 1}, "num_experts_per_tok is 2; allowed: an integer from 1 to 1"),
        ("Phi-3.5-MoE", {"router_jitter_noise": -1.0}, "router_jitter_noise is -1.0; allowed: a number from 0 to 1000"),
        ("Phi-3.5-MoE", {"rope_scaling": {"type": "yarn"}}, "type is 'yarn'; allowed: 'default' or 'longrope' or 'su'"),
        (
            "Phi-3.5-MoE",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 64, "long_factor": [1.0] * 64}},
            "long_mscale is None; allowed: a number",
        ),
        ("gpt2", {"n_layer": 10**9}, "n_layer is 1000000000; allowed: an integer from 1 to 1000"),
    ],
)
def test_a_setting_of_a_family_that_nothing_interprets_is_refused(
    name: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, published(name, **changes))
    assert message in str(refused.value)


# --- settings for generation ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, GenerationDefaults()),
        ({"do_sample": False, "temperature": 0.6}, GenerationDefaults(temperature=0.0)),
        ({"temperature": 0.6, "max_new_tokens": 9, "max_length": 20}, GenerationDefaults(temperature=0.6)),
        (
            {"do_sample": True, "top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05},
            GenerationDefaults(top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.05),
        ),
        ({"temperature": None, "top_k": -1}, GenerationDefaults(top_k=-1)),
    ],
)
def test_defaults_for_sampling(generation: object, expected: GenerationDefaults, tmp_path: Path) -> None:
    assert read(tmp_path, tiny(), generation).generation == expected


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"temperature": "warm"}, "generation_config.json: temperature is 'warm'; allowed: a number from 0 to 100"),
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 1.5}, "top_p is 1.5; allowed: a number from 0 to 1"),
        ({"top_k": 1.5}, "top_k is 1.5; allowed: an integer from -1"),
        ({"min_p": True}, "min_p is True"),
        ({"do_sample": "no"}, "do_sample is 'no'; allowed: true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; allowed: one token id or several"),
    ],
)
def test_defaults_that_make_no_sense_are_refused(generation: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, tiny(), generation)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, "float32"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
    ],
)
def test_the_dtype_of_the_checkpoint(fields: dict[str, object], dtype: str, tmp_path: Path) -> None:
    model = read(tmp_path, tiny(**fields))
    assert model.dtype == dtype


def test_a_scaling_that_is_frozen_at_load_is_a_notice(tmp_path: Path) -> None:
    config = tiny(rope_parameters={"rope_theta": 1e4, "rope_type": "dynamic", "factor": 4.0}, torch_dtype="float16")
    assert [notice[:30] for notice in read(tmp_path, config).notices] == [
        "rope scaling 'dynamic' depends",
    ]
    longer = read_model(ModelFolder(tmp_path), max_length=10_000)
    assert longer.spec.context_length == 10_000
    assert longer.notices[0].endswith("stretched for 10000 tokens")
    assert longer.spec.layers[0].rope != read_model(ModelFolder(tmp_path)).spec.layers[0].rope


def test_transformers_4_and_5_say_the_same_model(tmp_path: Path) -> None:
    newer: dict[str, object] = {
        name: value for name, value in QWEN3_06B.items() if name not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    newer |= {
        "dtype": "bfloat16",
        "layer_types": ["full_attention"] * 28,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    }
    assert read(tmp_path, newer) == read(tmp_path, QWEN3_06B)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, [None, None, None]),
        ({**WINDOWS, "max_window_layers": 1}, [None, 24, 24]),
        ({**WINDOWS, "max_window_layers": 0}, [24, 24, 24]),
        ({**WINDOWS, "max_window_layers": 28}, [None, None, None]),
        ({"sliding_window": 24, "max_window_layers": 0}, [None, None, None]),
        ({**WINDOWS, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}, [24, None, None]),
    ],
)
def test_windows_are_those_of_the_layers(changes: dict[str, object], windows: list[int | None], tmp_path: Path) -> None:
    spec = read(tmp_path, tiny(**changes)).spec
    assert [layer.window for layer in spec.layers] == windows
    groups = spec.kv_cache_spec(16).groups
    assert {layer: group.window for group in groups for layer in group.layers} == dict(enumerate(windows))


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (None, None, ()),
        (7, {"eos_token_id": [9, 7]}, (9, 7)),
        (7, {"eos_token_id": 9}, (9,)),
        (7, {"top_p": 0.9}, (7,)),
    ],
)
def test_the_tokens_that_end_a_text(
    config: object, generation: object, expected: tuple[int, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, tiny(eos_token_id=config), generation).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT7"]},
            "a model of the family 'GPT7', which quire cannot run. Use a model of one of these: ",
        ),
        (
            {"architectures": ["GPT7"]},
            "Starcoder2, VaultGemma, Youtu (each + ForCausalLM), Gemma3, Gemma3n, Gemma4, Gemma4Unified",
        ),
        ({"architectures": []}, "a model that names no family, which quire cannot run. Use a model of"),
        ({"dtype": "int8"}, "dtype is 'int8'; allowed: one of float32, bfloat16, float16"),
        ({"torch_dtype": 16}, "torch_dtype is 16; allowed: one of float32, bfloat16, float16"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quant_method is None; allowed: one of auto-r"),
        ({"architectures": None}, "architectures is None; allowed: a list of strings"),
        ({"hidden_act": "gelu_fast"}, "hidden_act is 'gelu_fast'; allowed: one of silu, swish, gelu, gelu_new"),
        ({"vocab_size": 0}, "vocab_size is 0; allowed: an integer from 1 to 16777215"),
        ({"vocab_size": None}, "vocab_size is None; allowed: an integer"),
        ({"hidden_size": "64"}, "hidden_size is '64'; allowed: an integer"),
        ({"hidden_size": True}, "hidden_size is True; allowed: an integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; allowed: an integer from 1 to 1000"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4; allowed: a multiple of the 3 kv heads"),
        ({"head_dim": 31}, "rotary dimensions is 31; allowed: an even number from 2 to 31"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; allowed: a number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; allowed: a number above 0"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; allowed: true or false"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_parameters: rope_type is 'mrope'; allowed: one of default"),
        ({"rope_parameters": {"rope_theta": 1e400}}, "rope_parameters: rope_theta is inf; allowed: a number above 0"),
        ({"rope_parameters": 3}, "rope_parameters is 3; allowed: an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is None; allowed: a number"),
        ({"layer_types": ["full_attention"]}, "allowed: 3 of full_attention, sliding_attention"),
        ({"layer_types": ["linear_attention"] * 3}, "allowed: 3 of full_attention, sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_window is None; allowed: a window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0; allowed: an integer from 1"),
        ({"is_causal": False}, "is_causal is False; allowed: true: no token attends to later ones"),
        ({"text_config": {"is_causal": False}}, "text_config: is_causal is False; allowed: true"),
        (
            {"per_layer_config": {"1": {"sliding_window": 8}}},
            "per_layer_config: 1 is {'sliding_window': 8}; allowed: null",
        ),
        ({"eos_token_id": 128}, "eos_token_id is 128; allowed: one token id or several, from 0 to 127"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]; allowed: one token id"),
    ],
)
def test_a_setting_that_is_not_understood_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, tiny(**changes))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pretraining_tp": 2}, "pretraining_tp is 2; allowed: 1"),
        ({"hidden_act": "gelu_fast"}, "hidden_act is 'gelu_fast'; allowed: one of silu, swish, gelu, gelu_new"),
        ({"mlp_bias": "no"}, "mlp_bias is 'no'; allowed: true or false"),
        ({"head_dim": None, "hidden_size": 66}, "hidden_size is 66; allowed: a multiple of the 4 heads"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; allowed: an integer from 1 to 1000"),
    ],
)
def test_a_setting_of_llama_that_is_not_understood_is_refused(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, tiny_llama_config() | changes)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "SmolLM3-3B",
            {"no_rope_layers": [1, 0]},
            "no_rope_layers is [1, 0]; allowed: a list of 0 and 1 for 36 layers",
        ),
        ("SmolLM3-3B", {"no_rope_layers": [2] * 36}, "allowed: a list of 0 and 1 for 36 layers"),
        ("Mamba-Codestral-7B", {"num_heads": 64}, "a number of heads of 64 that fill 8192, expand times hidden_size"),
        ("Mamba-Codestral-7B", {"use_bias": True}, "use_bias is True; allowed: false"),
        ("Olmo-Hybrid-7B", {"layer_types": ["full_attention"] * 32}, "32 of full_attention and linear_attention, both"),
        ("Apertus-8B", {"hidden_act": "silu"}, "hidden_act is 'silu'; allowed: 'xielu'"),
        ("Apertus-8B", {"xielu": [[1.0] * 4]}, "allowed: four numbers for each of the 32 layers"),
        ("Apertus-8B", {"xielu": [[1.0] * 3] * 32}, "allowed: four numbers for each of the 32 layers"),
        ("Apertus-8B", {"xielu": [{"a": "b"}] * 32}, "allowed: four numbers for each of the 32 layers"),
        ("Mellum2-12B-A2.5B", {"use_sliding_window": False}, "use_sliding_window is False; allowed: true or null"),
        ("Mellum2-12B-A2.5B", {"rope_scaling": {"rope_type": "yarn"}}, "allowed: null: each kind of layer has its own"),
        ("North-Mini-Code-1.0", {"use_parallel_block": False}, "use_parallel_block is False; allowed: true"),
        ("North-Mini-Code-1.0", {"num_shared_experts": 2**20}, "is 1048576; allowed: MLPs of 768 numbers that"),
        (
            "North-Mini-Code-1.0",
            {"layer_types": ["full_attention"] * 49, "prefix_dense_sliding_window_pattern": 4},
            "a sliding layer, because only those have",
        ),
        ("c4ai-command-r7b", {"layer_types": ["full_attention"] * 32}, "a sliding layer, because only those have"),
        ("c4ai-command-r7b", {"use_qk_norm": True}, "use_qk_norm is True; allowed: false"),
        (
            "stablelm-2-1_6b",
            {"qk_layernorm": True, "num_attention_heads": 512, "num_key_value_heads": 512, "head_dim": 8}
            | {"num_hidden_layers": 129},
            "at most 65536",
        ),
        ("falcon-7b", {"alibi": True}, "alibi is True; allowed: false, because quire has no positions by ALiBi"),
        ("falcon-40b", {"parallel_attn": False}, "parallel_attn is False; allowed: true with new_decoder_architecture"),
        ("falcon-40b", {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn is 3; allowed: an integer from 1 to 2"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": "LLGL"}, "one that gives the last of 64 layers a G"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": "LLLg"}, "allowed: a number of layers, or a text of L and G"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": ""}, "allowed: a number of layers, or a text of L and G"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": None}, "allowed: a number of layers, or a text of L and G"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0; allowed: an integer from 1"),
        ("granite-4.0-350m", {"layer_types": ["attention"] * 27}, "allowed: 28 of mamba, attention"),
        ("granite-4.0-350m", {"layer_types": ["conv"] * 28}, "allowed: 28 of mamba, attention"),
        ("granite-4.0-h-350m", {"mamba_n_heads": 50}, "a divisor of 1536, mamba_expand times hidden_size"),
        ("granite-4.0-h-350m", {"mamba_d_head": 64}, "mamba_d_head is 64; allowed: auto, or 32, which fills"),
        ("granite-4.0-h-350m", {"mamba_n_groups": 5}, "heads is '48 in 5 groups'; allowed: an even number, equally"),
        ("granite-4.0-h-350m", {"mamba_proj_bias": True}, "mamba_proj_bias is True; allowed: false"),
        ("granite-4.0-h-350m", {"time_step_limit": [0.001, 0.1]}, "allowed: null, or 0 to infinity"),
        ("Nemotron-Nano-9B-v2", {"hybrid_override_pattern": "M-X"}, "allowed: 1 to 1000 of M, *, -, E, mamba"),
        ("Nemotron-Nano-9B-v2", {"hybrid_override_pattern": None}, "allowed: 1 to 1000 of M, *, -, E, mamba"),
        ("Nemotron-Nano-9B-v2", {"moe_latent_size": 64}, "allowed: null: no experts of fewer numbers are run"),
        ("Nemotron-Nano-9B-v2", {"use_bias": True}, "use_bias is True; allowed: false"),
        ("Nemotron-Nano-9B-v2", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'; allowed: 'silu' or null"),
        ("granite-4.0-h-350m", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; allowed: 'silu' or null"),
        ("granite-4.0-350m", {"position_embedding_type": "alibi"}, "allowed: 'rope' or 'nope' or null"),
        (
            "granite-3.1-1b-a400m",
            {"shared_intermediate_size": -1},
            "shared_intermediate_size is -1; allowed: an integer",
        ),
        ("Hunyuan-1.8B", {"use_cla": True}, "use_cla is True; allowed: false"),
        ("phi-2", {"qk_layernorm": True}, "qk_layernorm is True; allowed: false"),
        (
            "Olmo-3-7B",
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e4}},
            "settings for full_attention and",
        ),
    ],
)
def test_a_setting_of_a_newer_family_that_nothing_interprets_is_refused(
    name: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        read(tmp_path, published(name, **changes))
    assert message in str(refused.value)


def test_only_the_far_layers_of_olmo_3_are_stretched(tmp_path: Path) -> None:
    layers = read(tmp_path, published("Olmo-3-7B")).spec.layers
    near, far = layers[0].rope, layers[3].rope
    assert near is not None and far is not None
    assert (near.scale, far.scale) == (1.0, pytest.approx(1.2079441541679836))
    assert near.inverse_frequencies[-1] == pytest.approx(500_000 ** (-126 / 128))
    assert far.inverse_frequencies[-1] == pytest.approx(near.inverse_frequencies[-1] / 8)


def test_far_layers_of_exaone_4_have_positions_only_without_near_ones(tmp_path: Path) -> None:
    layers = read(tmp_path, published("EXAONE-4.0-32B")).spec.layers
    assert [layer.rope is None for layer in layers[:5]] == [False, False, False, True, False]
    kinds = ["full_attention"] * 64
    assert {layer.rope for layer in read(tmp_path, published("EXAONE-4.0-32B", layer_types=kinds)).spec.layers} == {
        None
    }
    layers = read(tmp_path, published("EXAONE-4.0-1.2B")).spec.layers
    assert None not in {layer.rope for layer in layers}


def test_granite_4_may_lack_positions_and_have_experts(tmp_path: Path) -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    spec = read(tmp_path, published("granite-4.0-350m", position_embedding_type="nope", **experts)).spec
    assert {(layer.rope, layer.sparse) for layer in spec.layers} == {(None, True)}
    assert spec.experts is not None and (spec.experts.shared_size, spec.experts.intermediate_size) == (2048, 2048)
    without = read(tmp_path, published("granite-4.0-350m", position_embedding_type=None)).spec
    assert {layer.rope for layer in without.layers} == {None}


def test_gpt_oss_stretches_its_positions_even_where_its_settings_say_nothing_of_it(tmp_path: Path) -> None:
    model = read(tmp_path, published("gpt-oss-20b"))
    bare = {
        name: each for name, each in published("gpt-oss-20b").items() if name not in ("rope_scaling", "layer_types")
    }
    assert read(tmp_path, bare).spec == model.spec
    assert (model.spec.context_length, model.quantization) == (131072, "mxfp4, 4 bits")
    assert {layer.window for layer in model.spec.layers[::2]} == {128}
    assert {layer.window for layer in model.spec.layers[1::2]} == {None}
    rotary = model.spec.layers[0].rope
    assert rotary is not None
    assert rotary.scale == pytest.approx(0.1 * math.log(32) + 1)
    assert rotary.inverse_frequencies[-1] == pytest.approx(150_000 ** (-62 / 64) / 32)


def test_layers_of_deepseek_v3_that_guess_further_tokens_are_not_read(tmp_path: Path) -> None:
    model = read(tmp_path, published("DeepSeek-V3"))
    ignored = model.spec.ignored_tensors
    of_last = {name.replace("layers.61.", "layers.60.") for name in ignored if "layers.61." in name}
    names = expected_tensors(model.spec)
    assert {name for name in names if "layers.60." in name} <= of_last
    assert not ignored & names.keys()


def test_layers_with_experts_of_glm_4_7_flash_may_be_listed(tmp_path: Path) -> None:
    config = {
        **{"architectures": ["Glm4MoeLiteForCausalLM"], "hidden_size": 2048, "intermediate_size": 10240},
        **{"max_position_embeddings": 202752, "num_attention_heads": 20, "num_hidden_layers": 4, "vocab_size": 154880},
    }
    spec = read(tmp_path, config).spec
    assert [layer.sparse for layer in spec.layers] == [False, True, True, True]
    assert spec.kv_cache_spec(16, "bfloat16").bytes_per_token == 4 * (512 + 64) * 2
    kinds = ["sparse", "dense", "dense", "sparse"]
    assert [layer.sparse for layer in read(tmp_path, config | {"mlp_layer_types": kinds}).spec.layers] == [
        kind == "sparse" for kind in kinds
    ]
    for wrong in (kinds[1:], ["other"] * 4):
        with pytest.raises(CheckpointError, match=r"mlp_layer_types is .*; allowed: 4 of dense, sparse"):
            read(tmp_path, config | {"mlp_layer_types": wrong})


def test_the_scores_of_deepseek_are_scaled_with_their_positions(tmp_path: Path) -> None:
    scale = read(tmp_path, published("DeepSeek-V2-Lite")).spec.attention.scale
    assert scale == pytest.approx((0.1 * 0.707 * math.log(40) + 1) ** 2 / math.sqrt(192))
    assert read(tmp_path, published("DeepSeek-V2-Lite", rope_scaling=None)).spec.attention.scale == 192**-0.5


def test_a_clamped_gate_is_a_gate() -> None:
    with pytest.raises(CheckpointError, match="clamped_swiglu"):
        replace(SPECS["sinks"], mlp=replace(SPECS["sinks"].mlp, gated=False))


def test_biases_of_llama_are_those_of_its_settings(tmp_path: Path) -> None:
    spec = read(tmp_path, tiny_llama_config() | {"attention_bias": True, "mlp_bias": True, "head_dim": None}).spec
    assert (spec.attention.bias, spec.attention.output_bias, spec.mlp.bias) == (True, True, True)
    assert spec.attention.head_dim == 16


def test_a_folder_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json: it is empty"):
        read_model(ModelFolder(tmp_path))
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json: give the folder that has"):
        read_model(ModelFolder(tmp_path))
    with pytest.raises(CheckpointError, match=r"is a file\. Give the folder that has"):
        read_model(ModelFolder(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="No folder named"):
        read_model(ModelFolder(tmp_path / "missing"))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json is 'a JSON list'; allowed: one JSON object"):
        read_model(ModelFolder(tmp_path))
    (tmp_path / "config.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    with pytest.raises(CheckpointError, match=r"config\.json is 'a git-lfs pointer'; allowed: the file itself; fetch"):
        read_model(ModelFolder(tmp_path))


# --- what a spec checks ------------------------------------------------------------------------


def test_a_spec_that_contradicts_itself_is_refused() -> None:
    rotary = rope(100.0, 16)
    sparse = replace(PLAIN.layers[0], sparse=True)
    experts, latent, groups = SPECS["experts"].experts, SPECS["latent"], SPECS["latent"].experts
    all_heads = SPECS["whole-norms"]
    assert experts is not None
    assert groups is not None
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: replace(PLAIN, layers=(LayerSpec(None, rope(100.0, 18)),)), "an even number from 2 to 16"),
        (lambda: replace(PLAIN, layers=(LayerSpec(None, replace(rotary, rotary_dim=8)),)), "is 8; allowed: 4 of them"),
        (lambda: replace(PLAIN, layers=(sparse,)), "a spec of experts for sparse layers"),
        (lambda: replace(all_heads, attention=replace(all_heads.attention, rotates_first=True)), "before positions"),
        (lambda: replace(latent, attention=replace(latent.attention, num_kv_heads=2)), "one key-value head, which is"),
        (lambda: replace(latent, attention=replace(latent.attention, sinks=True)), "one key-value head, which is"),
        (lambda: replace(latent, attention=replace(latent.attention, head_dim=64)), "one key-value head, which is"),
        (lambda: replace(latent, experts=replace(groups, group_best=3)), "is 3; allowed: from 1 to 2"),
        (lambda: replace(latent, experts=replace(groups, groups_per_token=1)), "is 1; allowed: from 2 to 4"),
        (lambda: replace(PLAIN, experts=replace(experts, experts_per_token=9)), "is 9; allowed: from 1 to 8"),
        (lambda: replace(PLAIN, experts=replace(experts, experts_per_token=0)), "is 0; allowed: from 1 to 8"),
        (lambda: replace(SPECS["streams"], parallel=True), "attention, then a gated MLP, in each layer"),
        (lambda: replace(SPECS["streams"], norm_before=False), "LAuReL is .without a norm before attention"),
        (lambda: replace(SPECS["streams"], layer_inputs=None), "AltUp is .without inputs of layers"),
    ]
    for make, message in wrong:
        with pytest.raises(CheckpointError, match=message):
            make()


def test_parts_of_one_tensor_must_fill_it() -> None:
    query = WeightSource("model.qkv.{layer}")
    for first_row in (0, 63, 65):
        key = WeightSource("model.qkv.{layer}", first_row=first_row)
        with pytest.raises(InvariantError, match="the rows of its parts do not fill it"):
            expected_tensors(replace(PLAIN, sources={**PLAIN.sources, Part.QUERY: query, Part.KEY: key}))


@pytest.mark.parametrize("name", SPECS)
def test_the_bytes_of_the_weights_are_those_of_the_tensors(name: str) -> None:
    rounded = exact = 0
    repeats = {part.value: source.repeats for part, source in SPECS[name].sources.items()}
    for tensor, shape in expected_tensors(SPECS[name]).items():
        # Only matrices are rounded, and not those that choose and weigh experts.
        exact_ones = {
            "mamba_filter",
            "router",
            "shared_router",
            "query_norm",
            "key_norm",
            "delta_filter",
            "convolution_filter",
            "stream_router",
            "stream_predict",
            "stream_correct",
        }
        narrow = len(shape) > 1 and not exact_ones & set(tensor.split("."))
        numbers = math.prod(shape) * repeats.get(tensor.split(".")[1], 1)
        rounded += (2 if narrow else 4) * numbers
        exact += 4 * numbers
    assert weight_bytes(SPECS[name]) == exact
    assert weight_bytes(SPECS[name], "bfloat16") == rounded
