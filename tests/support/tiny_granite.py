"""A tiny Granite 4 H, with six state-space layers and two with attention, and a tiny Nemotron-H: random weights."""

from __future__ import annotations

from pathlib import Path

from support.spec_models import write_model_of

CONFIG: dict[str, object] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "shared_intermediate_size": 96, "num_hidden_layers": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "dtype": "float32"},
    **{"num_local_experts": 0, "intermediate_size": 96, "rms_norm_eps": 1e-5, "eos_token_id": 127},
    **{"mamba_n_heads": 8, "mamba_d_state": 16, "layer_types": (["mamba"] * 3 + ["attention"]) * 2},
}

NEMOTRON: dict[str, object] = {
    "architectures": ["NemotronHForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "dtype": "float32", "eos_token_id": 127},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024},
    **{"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "conv_kernel": 4},
    **{"n_routed_experts": 6, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64},
    **{"num_experts_per_tok": 2, "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"n_group": 1, "layer_norm_epsilon": 1e-5},
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "linear_attention", "full_attention", "mlp"],
}


def write_tiny_nemotron(folder: Path, **settings: object) -> Path:
    """Write the folder of a Nemotron-H and return it. `settings` replace fields of config.json."""
    return write_model_of(folder, {**NEMOTRON, **settings})


def write_tiny_granite(folder: Path, **settings: object) -> Path:
    """Write the model's folder and return it. `settings` replace fields of config.json."""
    return write_model_of(folder, {**CONFIG, **settings})
