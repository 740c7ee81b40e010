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
    part = name.split(".")[-2]
    if part == "conv1d" and numbers.ndim == 3:
        return numbers[:, 0]
    if part == "A_log":
        return -np.exp(numbers)[:, None]
    if part == "D":
        return numbers[:, None]
    return numbers.reshape(config.get("mamba_n_groups", 1), -1) if part == "norm" else numbers
