"""The settings, positions and experts of Gemma 4 in a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gguf
import numpy as np


def add_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the settings that no other architecture has in this form, to a file in the making."""
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    is_near = [kind == "sliding_attention" for kind in config["layer_types"]]
    num_shared, size, width = config["num_kv_shared_layers"], config["head_dim"], config["intermediate_size"]
    wide = next(each for layer, each in config["per_layer_config"].items() if not is_near[int(layer)])
    writer.add_shared_kv_layers(num_shared)
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input", 0))
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(is_near)
    writer.add_key_length(wide["head_dim"])
    writer.add_value_length(wide["head_dim"])
    writer.add_key_length_swa(size)
    writer.add_value_length_swa(size)
    if config.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([width] * (len(is_near) - num_shared) + [2 * width] * num_shared)
    else:
        writer.add_feed_forward_length(width)
    usual = config["num_key_value_heads"]
    of_wide = wide.get("num_key_value_heads")
    writer.add_head_count_kv(usual if of_wide is None else [usual if near else of_wide for near in is_near])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config.get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config.get("num_experts"):
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
    _add_positions(writer, config, wide["head_dim"])


def _add_positions(writer: gguf.GGUFWriter, config: dict[str, Any], size: int) -> None:
    near, full = (config["rope_parameters"][kind] for kind in ("sliding_attention", "full_attention"))
    writer.add_rope_freq_base(full["rope_theta"])
    writer.add_rope_freq_base_swa(near["rope_theta"])
    writer.add_rope_dimension_count(size)
    writer.add_rope_dimension_count_swa(config["head_dim"])
    turned = int(size * full["partial_rotary_factor"] / 2)
    divisors = [1.0] * turned + [1e30] * (size // 2 - turned)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def name_of_factors(name: str) -> str | None:
    """Return the file's name for a router's norm, or for the factors of experts; None for other tensors."""
    layer, _, part = name.removeprefix("model.layers.").partition(".router.")
    stored = {"scale.weight": "ffn_gate_inp.scale", "per_expert_scale.weight": "ffn_down_exps.scale"}
    return f"blk.{layer}.{stored[part]}" if part in stored else None


def stacks_of_gemma4(experts: Mapping[str, Mapping[int, Any]], *, has_gate_up: bool) -> dict[str, Any]:
    """Return the stacked experts of all layers by their names in the file; with `has_gate_up`, gate and up as one."""
    stacks: dict[str, Any] = {}
    for name, each in experts.items():
        layer, _, part = name.removeprefix("model.layers.").partition(".experts.")
        matrix = part.removesuffix("_proj.weight")
        stacks[f"blk.{layer}.ffn_{matrix}_exps.weight"] = np.stack([each[expert] for expert in sorted(each)])
    for name in [name for name in stacks if has_gate_up and ".ffn_gate_exps." in name]:
        up = stacks.pop(name.replace("gate", "up"))
        stacks[name.replace("gate", "gate_up")] = np.concatenate([stacks.pop(name), up], axis=1)
    return stacks
