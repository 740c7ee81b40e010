"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, and with a list of the layers that have experts.

transformers calls the family GLM-4-MoE-Lite. Without a list, all layers but the first have experts.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import deepseek
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType(
    {
        **{"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64},
        **{"v_head_dim": 256, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 4},
        **{"n_routed_experts": 64, "moe_intermediate_size": 1536, "routed_scaling_factor": 1.8},
        "first_k_dense_replace": 1,
    }
)
KINDS: Final = frozenset({"dense", "sparse"})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a GLM-4.7-Flash model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = deepseek.decoder_spec(config, max_length)
    return replace(spec, layers=with_listed_experts(config, spec.layers))


def with_listed_experts(config: ConfigFile, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """Return the layers with experts by `mlp_layer_types`; unchanged without that list."""
    if not config.is_set("mlp_layer_types"):
        return layers
    kinds = config.texts("mlp_layer_types")
    if len(kinds) != len(layers) or not KINDS.issuperset(kinds):
        raise config.error("mlp_layer_types", f"{len(layers)} of {', '.join(sorted(KINDS))}")
    return tuple(replace(layer, sparse=kind == "sparse") for layer, kind in zip(layers, kinds, strict=True))
