"""The settings of LFM2 and LFM2-MoE in a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from typing import Any

import gguf


def add_lfm2(writer: gguf.GGUFWriter, config: dict[str, Any], num_layers: int) -> None:
    """Add the settings that no other architecture has in this form, to a file in the making."""
    kv_heads, full = config["num_key_value_heads"], config.get("full_attn_idxs", ())
    kinds = config.get("layer_types") or ["full_attention" if n in full else "conv" for n in range(num_layers)]
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    width = config["intermediate_size"]
    if config.get("block_auto_adjust_ff_dim", True):
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        multiple = config["block_multiple_of"]
        width = multiple * ((width + multiple - 1) // multiple)
    writer.add_feed_forward_length(width)
