"""Apertus: Llama with norms on heads and a plain MLP, whose activation (xIELU) has numbers of its own in each layer."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, num_layers, rotary_layers, with_head_norms, with_stems
from quire.compute.models.config_file import MAX_NUMBER, ConfigFile
from quire.compute.models.parts import Part, WeightSource
from quire.compute.models.sublayers import Activation

NUMBERS: Final = ("alpha_p", "alpha_n", "beta", "eps")
DEFAULTS: Final = MappingProxyType({"hidden_act": "xielu", "rms_norm_eps": 1e-5, "max_position_embeddings": 65_536})
ROPE: Final = MappingProxyType(
    {
        **{"rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
        **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    }
)
STEMS: Final = MappingProxyType(
    {Part.ATTENTION_NORM: LAYER + "attention_layernorm", Part.MLP_NORM: LAYER + "feedforward_layernorm"}
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of an Apertus model; refuses settings that quire does not interpret.

    The settings of a GGUF file have the numbers of the activations, `xielu`: a list of four for each layer.
    """
    config = config.over(DEFAULTS)
    config.require("hidden_act", "xielu")
    config = ConfigFile(config.where, {**config.fields, "hidden_act": None})
    if not (config.is_set("rope_parameters") or config.is_set("rope_scaling") or config.is_set("rope_theta")):
        config = ConfigFile(config.where, {**config.fields, "rope_scaling": dict(ROPE)})
    spec = with_head_norms(llama_like(config, max_length, rotary_layers(config, max_length)))
    spec = with_stems(replace(spec, mlp=replace(spec.mlp, activation=Activation.XIELU, gated=False)), STEMS)
    return replace(spec, sources=MappingProxyType({**spec.sources, Part.XIELU: _numbers(config)}))


def _numbers(config: ConfigFile) -> WeightSource:
    stored = config.fields.get("xielu")
    if stored is None:
        return WeightSource("", numbers=tuple(f"{LAYER}mlp.act_fn.{name}" for name in NUMBERS))
    count = num_layers(config)
    if not isinstance(stored, list) or len(stored) != count or not all(map(_has_numbers, stored)):
        raise config.error("xielu", f"four numbers for each of the {count} layers")
    return WeightSource("", values=tuple(tuple(map(float, numbers)) for numbers in stored))


def _has_numbers(found: object) -> bool:
    """Return whether a layer has its four numbers."""
    numbers = found if isinstance(found, list) else []
    return len(numbers) == len(NUMBERS) and all(type(one) in {int, float} and abs(one) < MAX_NUMBER for one in numbers)
