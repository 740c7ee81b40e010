"""The settings of families with experts in most layers, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf


def add_experts_after(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add what is said of experts after the first layers, by any of the names that families have for it."""

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    named = {
        writer.add_leading_dense_block_count: first(
            "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"
        ),
        writer.add_expert_shared_count: first("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
        writer.add_expert_weights_scale: first("routed_scaling_factor", "route_scale"),
        writer.add_expert_weights_norm: first("norm_topk_prob"),
        writer.add_expert_group_count: first("n_group"),
        writer.add_expert_group_used_count: first("topk_group"),
        writer.add_interleave_moe_layer_step: first("moe_layer_interval"),
    }
    for add, value in named.items():
        if value is not None:
            add(value)
    if first("moe_num_shared_experts"):
        writer.add_expert_shared_feed_forward_length(config["moe_intermediate_size"] * config["moe_num_shared_experts"])
    if config["architectures"][0] not in ("DeepseekV2ForCausalLM", "Ernie4_5_MoeForCausalLM"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
