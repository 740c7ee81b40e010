"""AFMoE (Trinity): a gate on attention, norms on both sides of each sublayer, and a window in three of four layers.

Only layers with a window have positions. All but the first layers have experts, weighed one by one as in DeepSeek-V3,
next to an MLP for every token.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, mixed_windows, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.deepseek import STEMS as EXPERT_STEMS
from quire.compute.models.deepseek import sparse_after, v3_experts
from quire.compute.models.parts import Part

DEFAULTS: Final = MappingProxyType(
    {
        **{"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 1024, "global_attn_every_n_layers": 4},
        **{"num_dense_layers": 1, "num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
        **{"num_shared_experts": 2, "route_scale": 1.0, "n_group": 1, "topk_group": 1},
    }
)
STEMS: Final = MappingProxyType(
    {
        **EXPERT_STEMS,
        Part.ATTENTION_GATE: LAYER + "self_attn.gate_proj",
        Part.AFTER_ATTENTION_NORM: LAYER + "post_attention_layernorm",
        Part.MLP_NORM: LAYER + "pre_mlp_layernorm",
        Part.AFTER_MLP_NORM: LAYER + "post_mlp_layernorm",
        Part.ROUTER: LAYER + "mlp.router.gate",
        Part.ROUTER_OFFSET: LAYER + "mlp.expert_bias",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an AFMoE model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.require("score_func", "sigmoid", None)
    config.refuse("attention_bias")
    if not config.flag("route_norm", True):
        raise config.error("route_norm", "true: the weights of a token's experts add up to 1")
    interval = config.size("global_attn_every_n_layers")
    window = config.size("sliding_window", high=MAX_LENGTH)
    windows = mixed_windows(config, window, lambda layer: (layer + 1) % interval != 0)
    layers = rotary_layers(config, max_length, windows)
    layers = tuple(layer if layer.window else replace(layer, rope=None) for layer in layers)
    config = _with_usual_names(config)
    spec = with_stems(with_head_norms(llama_like(config, max_length, layers)), STEMS)
    return replace(
        spec,
        norm_after=True,
        attention=replace(spec.attention, gated=True),
        embedding_scale=spec.hidden_size**0.5 if config.flag("mup_enabled", False) else 1.0,
        layers=sparse_after(config, spec.layers),
        experts=v3_experts(config),
    )


def _with_usual_names(config: ConfigFile) -> ConfigFile:
    """Return the settings with the names that DeepSeek-V3 has for those of experts."""
    names = {
        **{"first_k_dense_replace": "num_dense_layers", "n_routed_experts": "num_experts"},
        **{"n_shared_experts": "num_shared_experts", "routed_scaling_factor": "route_scale"},
    }
    usual = {ours: config.fields[theirs] for ours, theirs in names.items()}
    return ConfigFile(config.where, {**config.fields, **usual, "scoring_func": None})
