"""The settings and tensors of state-space layers in a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np


def add_mamba(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the settings that no other architecture has in this form, to a file in the making."""
    kinds, kv_heads = config["layer_types"], config["num_key_value_heads"]
    writer.add_head_count_kv([kv_heads if kind in ("attention", "full_attention") else 0 for kind in kinds])
    writer.add_ssm_conv_kernel(config.get("mamba_d_conv", 4))
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config.get("mamba_n_groups", 1))
    writer.add_ssm_inner_size(config.get("mamba_expand", 2) * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(False)


def as_mamba(name: str, numbers: Any, config: dict[str, Any]) -> Any:
    """Return the numbers of a tensor as the converter changes them."""
    part, num_groups = name.split(".")[-2], config.get("mamba_n_groups") or config.get("n_groups", 1)
    if part == "conv1d" and numbers.ndim == 3:
        return numbers[:, 0]
    if part == "A_log":
        return -np.exp(numbers)[:, None]
    if part == "D":
        return numbers[:, None]
    return numbers.reshape(num_groups, -1) if part == "norm" and (".mixer." in name or ".mamba." in name) else numbers


def add_nemotron(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the settings of Nemotron-H to a file in the making."""
    kinds, has_experts = config["layers_block_type"], "moe" in config["layers_block_type"]
    writer.add_head_count_kv([config["num_key_value_heads"] if kind == "full_attention" else 0 for kind in kinds])
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    writer.add_feed_forward_length([width if kind in ("mlp", "moe") else 0 for kind in kinds])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_state_size(config["ssm_state_size"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_ssm_time_step_rank(config["mamba_num_heads"])
    writer.add_rope_scaling_finetuned(False)
    if has_experts:
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])


def add_falcon_h1(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the settings of Falcon-H1 to a file in the making."""
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_d_ssm"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])


def with_factors(name: str, numbers: Any, config: dict[str, Any]) -> Any:
    """Return a tensor of Falcon-H1 multiplied by the factors that the converter multiplies into it."""
    entry, (gate, down) = config["attention_in_multiplier"], config["mlp_multipliers"]
    factors = {
        **{"q_proj": entry, "k_proj": entry * config["key_multiplier"], "v_proj": entry},
        **{"o_proj": config["attention_out_multiplier"], "out_proj": config["ssm_out_multiplier"]},
        **{"gate_proj": gate, "down_proj": down, "embed_tokens": config["embedding_multiplier"]},
        "lm_head": config["lm_head_multiplier"],
    }
    part = name.split(".")[-2]
    if part in factors:
        return numbers * np.float32(factors[part])
    if part != "in_proj":
        return numbers
    values, keys = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = [values, values, keys, keys, config["mamba_n_heads"]]
    each = [np.full(size, factor) for size, factor in zip(sizes, config["ssm_multipliers"], strict=True)]
    return numbers * (np.concatenate(each) * config["ssm_in_multiplier"]).astype(np.float32)[:, None]


def add_mamba2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add all settings of Mamba-2 to a file in the making; some are 0 because every file has them."""
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(2 * config["hidden_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
