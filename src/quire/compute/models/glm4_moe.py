"""GLM-4.5 and 4.6: Llama with experts in most layers, as in DeepSeek-V3; half of each head rotates.

transformers calls the family GLM-4-MoE. The large models have norms on heads.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import deepseek
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "n_group": 1, "topk_group": 1},
        **{"num_experts_per_tok": 8, "n_routed_experts": 128, "moe_intermediate_size": 1408, "n_shared_experts": 1},
        **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.0},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a GLM-4.5 or 4.6 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    spec = with_stems(llama_like(config, max_length, rotary_layers(config, max_length, partial=True)), deepseek.STEMS)
    if config.flag("use_qk_norm", False):
        spec = with_head_norms(spec)
    spec = replace(
        spec,
        attention=replace(spec.attention, output_bias=False),
        layers=deepseek.sparse_after(config, spec.layers),
        experts=deepseek.v3_experts(config),
    )
    return deepseek.without_further_layers(config, spec)
