"""A tiny Gemma 4: layers with two sizes of heads, some with the keys and values of others, with random weights."""

from __future__ import annotations

from pathlib import Path

from support.spec_models import write_model_of

NEAR, FAR = "sliding_attention", "full_attention"
CONFIG: dict[str, object] = {
    "architectures": ["Gemma4ForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "dtype": "float32"},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64},
    **{"layer_types": [NEAR, NEAR, NEAR, FAR, NEAR, FAR, NEAR, FAR], "num_kv_shared_layers": 2, "sliding_window": 24},
    **{"hidden_size_per_layer_input": 16, "use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
    **{"max_position_embeddings": 1024, "eos_token_id": 127},
}


def write_tiny_gemma4(folder: Path, **settings: object) -> Path:
    """Write the model's folder and return it. `settings` replace fields of config.json."""
    return write_model_of(folder, {**CONFIG, **settings})
