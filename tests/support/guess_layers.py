"""Tiny models with a layer that guesses their next tokens, as published checkpoints have it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.compute.models import read_model
from quire.compute.models.guess_layer import guess_layer
from quire.compute.models.parts import Part
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import expected_tensors
from support.spec_models import random_tensors
from support.tiny_checkpoint import write_model_weights
from support.tiny_recurrent import CONFIG

ROPE: Mapping[str, object] = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR, FULL = "linear_attention", "full_attention"
QWEN3_5: Mapping[str, object] = {
    **CONFIG,
    **{"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "rms_norm_eps": 1e-6},
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}
EXPERTS: Mapping[str, object] = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1},
    **{"shared_expert_intermediate_size": 32, "mlp_only_layers": []},
}
QWEN3_5_MOE: Mapping[str, object] = {**QWEN3_5, **EXPERTS, "architectures": ["Qwen3_5MoeForCausalLM"]}
QWEN3_NEXT: Mapping[str, object] = {**QWEN3_5, **EXPERTS, "architectures": ["Qwen3NextForCausalLM"]}
COMMON: Mapping[str, object] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "dtype": "float32"},
    **{"num_attention_heads": 4, "max_position_embeddings": 1024, "eos_token_id": 127, "num_nextn_predict_layers": 1},
    **{"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "rope_parameters": ROPE},
    **{"rms_norm_eps": 1e-6, "routed_scaling_factor": 1.5, "norm_topk_prob": True},
}
LATENTS: Mapping[str, object] = {
    **{"kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"head_dim": 16, "num_key_value_heads": 4},
}
DEEPSEEK_V3: Mapping[str, object] = {**COMMON, **LATENTS, "architectures": ["DeepseekV3ForCausalLM"]}
GLM_FLASH: Mapping[str, object] = {**COMMON, **LATENTS, "architectures": ["Glm4MoeLiteForCausalLM"]}
GLM: Mapping[str, object] = {
    **COMMON,
    **{"architectures": ["Glm4MoeForCausalLM"], "num_key_value_heads": 2, "head_dim": 32, "use_qk_norm": True},
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
}
CONFIGS = {
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "glm4_moe": GLM,
    "glm4_moe_lite": GLM_FLASH,
    "deepseek_v3": DEEPSEEK_V3,
}
SUBLAYER_OUTPUTS = (Part.OUTPUT, Part.DOWN, Part.DELTA_OUTPUT, Part.EXPERT_DOWN, Part.SHARED_DOWN)

Tensors = dict[str, NDArray[np.float32]]


def write_guessing_model(
    folder: Path, config: Mapping[str, object] = QWEN3_5, *, is_always_right: bool = False, dtype: str = "F32"
) -> Tensors:
    """Write a model with its layer, and return the tensors.

    `is_always_right`: the next token depends on the last one only, and the layer computes the same function.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    spec = read_model(ModelFolder(folder)).spec
    layer = guess_layer(spec)
    tensors = random_tensors(expected_tensors(spec) | expected_tensors(layer))
    for name in (name for name in tensors if ".A_log." in name):
        numbers = np.linspace(-2, 2, 100, dtype=np.float32)  # some that the exponential in GGUF does not change
        tensors[name] = numbers[np.log(np.exp(numbers)) == numbers][: len(tensors[name])]
    if is_always_right:
        for sources in (spec.sources, layer.sources):
            ends = tuple(sources[part].stem.rpartition(".")[2] for part in SUBLAYER_OUTPUTS if part in sources)
            for name in tensors:
                if name.removesuffix(".weight").endswith(ends):
                    tensors[name][:] = 0
        join = tensors[f"{layer.sources[Part.EMBEDDING_IN].stem}.weight"]
        join[:] = np.eye(*join.shape)
        ones = 0 if spec.norm.unit_offset else 1
        tensors[f"{layer.sources[Part.TOKEN_NORM].stem}.weight"][:] = ones
        tensors[f"{layer.sources[Part.FINAL_NORM].stem}.weight"][:] = tensors[
            f"{spec.sources[Part.FINAL_NORM].stem}.weight"
        ]
    write_model_weights(folder, tensors, dtype=dtype)
    return tensors
