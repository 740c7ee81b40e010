"""A tiny Gemma 3n: four residual streams, LAuReL and thresholds of gates, with random weights."""

from __future__ import annotations

from pathlib import Path

from support.spec_models import write_model_of

NEAR, FAR = "sliding_attention", "full_attention"
CONFIG: dict[str, object] = {
    "architectures": ["Gemma3nForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "dtype": "float32"},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "sliding_window": 24, "laurel_rank": 16},
    **{"layer_types": [NEAR, NEAR, FAR, NEAR, NEAR, FAR], "num_kv_shared_layers": 3, "rms_norm_eps": 1e-6},
    **{"activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.8, 0.0], "max_position_embeddings": 1024},
    **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 120, "eos_token_id": 127},
}


def write_tiny_gemma3n(folder: Path, **settings: object) -> Path:
    """Write the model's folder and return it. `settings` replace fields of config.json."""
    return write_model_of(folder, {**CONFIG, **settings})
