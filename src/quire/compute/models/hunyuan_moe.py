"""Hunyuan-MoE: Hunyuan with experts in each layer, next to an MLP for every token.

Settings of experts may be lists with a number for each layer; a model runs if all its layers are alike.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models import hunyuan
from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, with_stems
from quire.compute.models.config_file import MAX_SIZE, ConfigFile
from quire.compute.models.mixtral import local_experts
from quire.compute.models.parts import Part
from quire.compute.models.qwen3_moe import STEMS as EXPERT_STEMS

LISTED: Final = MappingProxyType(
    {"num_experts": 1, "moe_topk": 1, "num_shared_expert": 1, "moe_intermediate_size": None}
)
"""Settings that may be lists, with their defaults."""

SHARED: Final = LAYER + "mlp.shared_mlp."
STEMS: Final = MappingProxyType(
    {
        **EXPERT_STEMS,
        Part.ROUTER: LAYER + "mlp.gate.wg",
        Part.SHARED_GATE: SHARED + "gate_proj",
        Part.SHARED_UP: SHARED + "up_proj",
        Part.SHARED_DOWN: SHARED + "down_proj",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Hunyuan-MoE model; refuses settings that quire does not interpret."""
    config = _without_lists(config)
    if config.size("moe_layer_num_skipped", 0, low=0):
        raise config.error("moe_layer_num_skipped", "0 or null: experts in every layer")
    spec = with_stems(hunyuan.decoder_spec(config, max_length), STEMS)
    size = spec.mlp.intermediate_size
    width, num_shared = config.size("moe_intermediate_size", size), config.size("num_shared_expert", low=0)
    if width * num_shared > MAX_SIZE:
        raise config.error("num_shared_expert", f"MLPs of {width} numbers that have at most {MAX_SIZE} together")
    usual = {"num_experts_per_tok": config.fields["moe_topk"], "intermediate_size": width}
    experts = local_experts(ConfigFile(config.where, {**config.fields, **usual}), "num_experts")
    return replace(
        spec,
        experts=replace(experts, shared_size=width * num_shared),
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
    )


def _without_lists(config: ConfigFile) -> ConfigFile:
    """Return the settings with one number instead of each list of equal numbers."""
    fields = config.over(LISTED).fields
    for field in LISTED:
        found = fields[field]
        if isinstance(found, list):
            if not found or any(each != found[0] for each in found):
                raise config.error(field, "a number, or a list with the same number for each layer")
            fields[field] = found[0]
    return ConfigFile(config.where, fields)
