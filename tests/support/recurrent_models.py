"""Small models with linear attention, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.compute.weights.decoder_weights import expected_tensors

LINEAR, FULL = "linear_attention", "full_attention"
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
    "shared_expert_intermediate_size": 40,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-next": {
        **{**SIZES, **EXPERTS, "architectures": ["Qwen3NextForCausalLM"]},
        **{"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "tie_word_embeddings": False},
    },
    "qwen3-5": {
        **{**SIZES, "architectures": ["Qwen3_5ForCausalLM"]},
        **{"num_hidden_layers": 4, "layer_types": [LINEAR, LINEAR, LINEAR, FULL], "tie_word_embeddings": False},
    },
    "qwen3-5-moe": {
        **{**SIZES, **EXPERTS, "architectures": ["Qwen3_5MoeForCausalLM"]},
        **{"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR], "tie_word_embeddings": True},
    },
}


def write_folder(form: str, folder: Path, changes: dict[str, Any] | None = None) -> Path:
    """Write a model of a form into a new folder, and return the folder.

    A GGUF file has the exponential of the logarithms of decays; these are some that it does not change.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[form] | (changes or {})))
    random, tensors = np.random.default_rng(0), {}
    for name, shape in expected_tensors(read_model(ModelFolder(folder)).spec).items():
        tensors[name] = random.normal(0, 0.1, shape).astype(np.float32)
        if ".A_log." in name:
            numbers = random.uniform(-2, 2, 100).astype(np.float32)
            tensors[name] = numbers[np.log(np.exp(numbers)) == numbers][: shape[0]]
    save_file(tensors, folder / "model.safetensors")
    return folder
