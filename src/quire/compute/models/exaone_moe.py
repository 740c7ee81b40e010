"""EXAONE-MoE (K-EXAONE): the windows and heads of EXAONE 4 with norms before each sublayer, and experts in most layers.

Experts are weighed as in DeepSeek-V3, next to an MLP for every token. Tensors that predict further tokens are not used.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import exaone4
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.deepseek import STEMS as EXPERT_STEMS
from quire.compute.models.deepseek import sparse_after, v3_experts, without_further_layers
from quire.compute.models.glm4_moe_lite import with_listed_experts
from quire.compute.models.parts import Part

DEFAULTS: Final = MappingProxyType(
    {
        **exaone4.DEFAULTS,
        **{"first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8},
        **{"num_shared_experts": 1, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1},
    }
)
STEMS: Final = MappingProxyType({**EXPERT_STEMS, Part.ROUTER_OFFSET: LAYER + "mlp.e_score_correction_bias"})


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an EXAONE-MoE model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    layers = exaone4.windowed_layers(config, max_length)
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    usual = {ours: config.fields[theirs] for ours, theirs in names.items()}
    config = ConfigFile(config.where, {**config.fields, **usual})
    spec = with_head_norms(with_stems(llama_like(config, max_length, layers), STEMS))
    layers = with_listed_experts(config, sparse_after(config, spec.layers))
    spec = replace(spec, layers=layers, experts=v3_experts(config), ignored_prefixes=("mtp.",))
    return without_further_layers(config, spec)
