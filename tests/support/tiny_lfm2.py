"""A tiny LFM2: six short convolutions and two layers with attention, with random weights. And LFM3, with windows."""

from __future__ import annotations

from pathlib import Path

from support.spec_models import write_model_of

CONFIG: dict[str, object] = {
    "architectures": ["Lfm2ForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "dtype": "float32"},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "conv_L_cache": 3},
    **{"full_attn_idxs": [3, 6], "block_auto_adjust_ff_dim": False, "eos_token_id": 127},
}


def write_tiny_lfm2(folder: Path, **settings: object) -> Path:
    """Write the model's folder and return it. `settings` replace fields of config.json."""
    return write_model_of(folder, {**CONFIG, **settings})


def write_tiny_lfm3(folder: Path) -> Path:
    """Write the folder of an LFM3 and return it: full attention in two layers, a window in one, five convolutions."""
    windows = {"sliding_window": 24, "head_dim": 16}
    return write_tiny_lfm2(folder, architectures=["Lfm3ForCausalLM"], conv_L_cache=7, **windows)
