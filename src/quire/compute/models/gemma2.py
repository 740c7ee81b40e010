"""Gemma 2: norms on both sides of each sublayer, a window in every other layer, soft caps.

Norms scale by 1 + w, and the rows of the embedding by the root of the hidden size; attention has its own
scale (`query_pre_attn_scalar`). Null means no soft cap; a missing soft cap has the published value. Of the
two settings for the activation, transformers reads `hidden_activation`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import LAYER, activation, llama_like, mixed_windows, rotary_layers, with_stems
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import Part

DEFAULTS: Final = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.AFTER_ATTENTION_NORM: LAYER + "post_attention_layernorm",
        Part.MLP_NORM: LAYER + "pre_feedforward_layernorm",
        Part.AFTER_MLP_NORM: LAYER + "post_feedforward_layernorm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Gemma 2 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    windows = mixed_windows(config, config.size("sliding_window", high=MAX_LENGTH), lambda layer: layer % 2 == 0)
    return gemma_like(config, max_length, rotary_layers(config, max_length, windows))


def gemma_like(config: ConfigFile, max_length: int | None, layers: Sequence[LayerSpec]) -> DecoderSpec:
    """Return the spec that Gemma 2 and 3 share."""
    config.refuse("use_bidirectional_attention")
    gelu = activation(config, "hidden_activation", "gelu_pytorch_tanh")
    spec = llama_like(config, max_length, layers)
    return replace(
        with_stems(spec, STEMS),
        norm=replace(spec.norm, unit_offset=config.flag("rms_norm_unit_offset", True)),  # GGUF files include the 1
        norm_after=True,
        attention=replace(
            spec.attention,
            scale=config.number("query_pre_attn_scalar") ** -0.5,
            score_soft_cap=_soft_cap(config, "attn_logit_softcapping"),
        ),
        mlp=replace(spec.mlp, activation=gelu),
        embedding_scale=spec.hidden_size**0.5,
        logit_soft_cap=_soft_cap(config, "final_logit_softcapping"),
    )


def _soft_cap(config: ConfigFile, field: str) -> float | None:
    return config.number(field) if config.is_set(field) else None
