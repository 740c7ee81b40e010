"""MiniCPM3: one latent for all heads (MLA), an MLP in each layer, and factors for embedding, residuals and logits.

Unlike in DeepSeek's models, rotating dimensions are stored as two halves, not as adjacent pairs.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import divided_head_dim
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.deepseek import latent_like

DEFAULTS: Final = MappingProxyType(
    {
        **{"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
        **{"rms_norm_eps": 1e-5, "scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256},
        "tie_word_embeddings": True,
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a MiniCPM3 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    if not config.is_set("v_head_dim"):
        value_dim = divided_head_dim(config, "hidden_size", "num_attention_heads")
        config = ConfigFile(config.where, {**config.fields, "v_head_dim": value_dim})
    spec = latent_like(config, max_length, has_pairs=False)
    depth = math.sqrt(len(spec.layers))
    return replace(
        spec,
        mlp=replace(spec.mlp, bias=config.flag("mlp_bias", False)),
        embedding_scale=config.number("scale_emb"),
        residual_scale=config.number("scale_depth", depth) / depth,
        logit_scale=config.size("dim_model_base", spec.hidden_size) / spec.hidden_size,
    )
