"""A tiny Qwen3.5: six recurrent layers and two with attention, with random weights."""

from __future__ import annotations

from pathlib import Path

from support.spec_models import write_model_of

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "dtype": "float32"},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 16, "eos_token_id": 127},
}


def write_tiny_qwen3_5(folder: Path, **settings: object) -> Path:
    """Write the model's folder and return it. `settings` replace fields of config.json."""
    return write_model_of(folder, {**CONFIG, **settings})
