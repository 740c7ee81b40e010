"""A tiny Granite 4 H: six state-space layers and two layers with attention, with random weights."""

from __future__ import annotations

import json
from pathlib import Path

from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from support.spec_models import write_spec_model

CONFIG: dict[str, object] = {
    "architectures": ["GraniteMoeHybridForCausalLM"],
    **{"vocab_size": 128, "hidden_size": 64, "shared_intermediate_size": 96, "num_hidden_layers": 8},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024, "dtype": "float32"},
    **{"num_local_experts": 0, "intermediate_size": 96, "rms_norm_eps": 1e-5, "eos_token_id": 127},
    **{"mamba_n_heads": 8, "mamba_d_state": 16, "layer_types": (["mamba"] * 3 + ["attention"]) * 2},
}


def write_tiny_granite(folder: Path, **settings: object) -> Path:
    """Write the model's folder and return it. `settings` replace fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **settings}))
    write_spec_model(folder, read_model(ModelFolder(folder)).spec)
    return folder
