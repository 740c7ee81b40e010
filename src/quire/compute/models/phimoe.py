"""Phi-3.5-MoE: Mixtral with layer norms, biases, positions scaled by factors, and another choice of experts.

transformers calls the family PhiMoE. A sparse mixer chooses a token's two experts; `router_jitter_noise` says how near
the score of another expert must be to share the weight. The scale of positions is a setting, for short and for long
texts. In long texts transformers 5 has the short factors with the long scale; quire has both long, like the published
code of the model.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import llama_like, optional_window, rotary_layers, same_windows, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mixtral import STEMS, local_experts
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.rope import SECTIONS, has_long_factors
from quire.compute.models.sublayers import ExpertsSpec, Scoring

DEFAULTS: Final = MappingProxyType(
    {"num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0}
)
PER_TOKEN: Final = 2
JITTER: Final = 0.01
MAX_JITTER: Final = 1000.0


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Phi-3.5-MoE model; refuses settings that quire does not interpret."""
    config = _with_scale(config.over(DEFAULTS), max_length)
    windows = same_windows(config, optional_window(config))
    spec = llama_like(config, max_length, rotary_layers(config, max_length, windows))
    return replace(
        with_stems(spec, STEMS),
        norm=NormSpec(NormKind.LAYER, spec.norm.epsilon),
        head_bias=config.flag("lm_head_bias", False),
        experts=_experts(config),
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
    )


def _experts(config: ConfigFile) -> ExpertsSpec:
    experts = local_experts(config)
    if experts.experts_per_token != PER_TOKEN:
        raise config.error("num_experts_per_tok", f"{PER_TOKEN}, as the sparse mixer chooses")
    jitter = config.optional_number("router_jitter_noise", low=0, high=MAX_JITTER)
    margin = 2 * (JITTER if jitter is None else jitter)
    return replace(experts, normalize_weights=False, scoring=Scoring.SPARSE_MIXER, margin=margin)


def _with_scale(config: ConfigFile, max_length: int | None) -> ConfigFile:
    """Return the settings with the scale of cosine and sine for the maximum length."""
    for field in SECTIONS:
        section = config.section(field)
        for name in ("rope_type", "type"):
            section.require(name, "default", "longrope", "su", None)
        if section.is_set("short_factor"):
            scale = section.number("long_mscale" if has_long_factors(config, max_length) else "short_mscale")
            scaled = {**section.fields, "attention_factor": scale}
            return ConfigFile(config.where, {**config.fields, field: scaled})
    return config
