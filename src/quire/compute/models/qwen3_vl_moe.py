"""Qwen3-VL-MoE: the text model of Qwen3-MoE with full attention, next to an encoder of images.

A file has all experts of a layer in one tensor; `unstacked` gives each its own matrices. The weights of a token's
experts always add up to 1.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.multimodal import below, text_config, with_other_tensors
from quire.compute.models.qwen3_moe import STEMS, qwen_experts, with_sparse
from quire.compute.models.qwen3_vl import IMAGES, TEXT, with_images

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 16, "rope_theta": 500_000.0, "num_experts": 60, "num_experts_per_tok": 4},
        **{"moe_intermediate_size": 1408, "norm_topk_prob": True},
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of the text model; refuses settings that quire does not interpret."""
    text = text_config(config).over(DEFAULTS)
    text.refuse("use_sliding_window")
    if not text.flag("norm_topk_prob", True):
        raise text.error("norm_topk_prob", "true, as transformers computes these models")
    spec = with_head_norms(llama_like(text, max_length, rotary_layers(text, max_length)))
    spec = replace(with_stems(spec, STEMS), experts=qwen_experts(text), layers=with_sparse(text, spec.layers))
    return with_other_tensors(with_images(config, text, spec), below(TEXT), IMAGES)
