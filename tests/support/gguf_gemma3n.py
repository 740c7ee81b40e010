"""The settings and stacks of Gemma 3n in a GGUF file, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import gguf
import numpy as np


def add_gemma3n(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Add the settings that no other architecture has in this form, to a file in the making."""
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_float32("gemma3n.attention.shared_kv_layers", float(config["num_kv_shared_layers"]))
    shares = config["activation_sparsity_pattern"]
    writer.add_activation_sparsity_scale([NormalDist().inv_cdf(share) if share else -np.inf for share in shares])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])


def stacks_of_gemma3n(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors with the matrices of streams stacked."""
    found = {name: each for name, each in tensors.items() if "_projections." not in name}
    for module in ("model.altup_projections", "model.altup_unembed_projections"):
        found[f"{module}.weight"] = np.stack([tensors[f"{module}.{number}.weight"] for number in range(3)])
    return found
