"""Falcon-H1: attention and a state-space layer (Mamba-2) read the same rows in each layer, with factors everywhere.

A layer becomes two: a state-space layer, then attention with the MLP, which skips what the first one added. Factors of
matrices are multiplied into the weights when these are loaded, as in GGUF files.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import llama_like, rotary_layers, with_stems
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.mamba import IN_ORDER, mamba_rule, with_mamba
from quire.compute.models.parts import Part

DEFAULTS: Final = MappingProxyType(
    {
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "mamba_d_ssm": 1024, "mamba_rms_norm": False},
        **{"mlp_multipliers": [1.0] * 2, "ssm_multipliers": [1.0] * len(IN_ORDER)},
    }
)
PAIR: Final = "model.layers.{pair}."
FEED_FORWARD: Final = PAIR + "feed_forward."
STEMS: Final = MappingProxyType(
    {
        Part.ATTENTION_NORM: PAIR + "input_layernorm",
        **{part: f"{PAIR}self_attn.{part.value[0]}_proj" for part in (Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT)},
        Part.MLP_NORM: PAIR + "pre_ff_layernorm",
        **{part: f"{FEED_FORWARD}{part.value}_proj" for part in (Part.GATE, Part.UP, Part.DOWN)},
        Part.FINAL_NORM: "model.final_layernorm",
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Falcon-H1 model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    config.refuse("attention_bias", "mlp_bias", "projectors_bias")
    layers: list[LayerSpec] = []
    for layer in rotary_layers(config, max_length):
        layers += [replace(layer, transforms=False), layer]
    spec = with_stems(llama_like(config, max_length, layers), STEMS)
    has_norm = config.flag("mamba_rms_norm", False)
    if has_norm and config.flag("mamba_norm_before_gate", True):
        raise config.error("mamba_norm_before_gate", "false: the norm is after the gate")
    rule = mamba_rule(config, spec.norm if has_norm else None)
    spec = with_mamba(spec, rule, [not layer.transforms for layer in layers], PAIR + "mamba.")
    entry = config.number("attention_in_multiplier", 1.0)
    return replace(
        _with_factors(config, spec, entry),
        layers=tuple(replace(layer, skips_previous=layer.transforms) for layer in spec.layers),
        attention=replace(
            spec.attention, scale=spec.attention.scale * entry * entry * config.number("key_multiplier", 1.0)
        ),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        logit_scale=config.number("lm_head_multiplier", 1.0),
    )


def _with_factors(config: ConfigFile, spec: DecoderSpec, entry: float) -> DecoderSpec:
    """Return the spec whose matrices have their factors; `entry`: that of the rows that attention reads."""
    of_mlp, of_states = config.numbers("mlp_multipliers"), config.numbers("ssm_multipliers")
    for field, found, parts in (("mlp_multipliers", of_mlp, 2), ("ssm_multipliers", of_states, len(IN_ORDER))):
        if len(found) != parts:
            raise config.error(field, f"a list of {parts} numbers")
    factors = {
        Part.OUTPUT: entry * config.number("attention_out_multiplier", 1.0),
        Part.MAMBA_OUTPUT: config.number("ssm_out_multiplier", 1.0),
        **dict(zip((Part.GATE, Part.DOWN), of_mlp, strict=True)),
    }
    before = config.number("ssm_in_multiplier", 1.0)
    factors |= {part: before * factor for part, factor in zip(IN_ORDER, of_states, strict=True)}
    sources = {part: replace(spec.sources[part], factor=factor) for part, factor in factors.items()}
    return replace(spec, sources=MappingProxyType({**spec.sources, **sources}))
