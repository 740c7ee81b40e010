"""GPT-NeoX and Pythia: layer norms, biases, a plain MLP; attention and MLP read the same rows, each by its own norm.

Query, key and value of each head are consecutive in one tensor. The first configs call the rotating part of a head
`rotary_pct`, and the base of its positions `rotary_emb_base`. Their checkpoints have the causal mask among the weights.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import activation, llama_like, rotary_layers, stem_sources, with_runs
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import MLPSpec

LAYER: Final = "gpt_neox.layers.{layer}."
QKV: Final = LAYER + "attention.query_key_value"
STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING: "gpt_neox.embed_in",
        Part.ATTENTION_NORM: LAYER + "input_layernorm",
        Part.OUTPUT: LAYER + "attention.dense",
        Part.MLP_NORM: LAYER + "post_attention_layernorm",
        Part.UP: LAYER + "mlp.dense_h_to_4h",
        Part.DOWN: LAYER + "mlp.dense_4h_to_h",
        Part.FINAL_NORM: "gpt_neox.final_layer_norm",
        Part.HEAD: "embed_out",
    }
)
UNUSED: Final = ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq")


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a GPT-NeoX model; refuses settings that quire does not interpret."""
    config = _named_as_usual(config)
    spec = llama_like(config, max_length, rotary_layers(config, max_length, partial=True))
    unused = {LAYER.format(layer=layer) + name for layer in range(len(spec.layers)) for name in UNUSED}
    tied = {"embed_out.weight"} if spec.tied_head else set()
    spec = replace(
        spec,
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_eps", 1e-5)),
        mlp=MLPSpec(spec.mlp.intermediate_size, activation(config, "hidden_act", "gelu"), gated=False, bias=True),
        sources=stem_sources(STEMS),
        ignored_tensors=frozenset(unused | tied),
        parallel=config.flag("use_parallel_residual", True),
    )
    return with_runs(spec, QKV)


def _named_as_usual(config: ConfigFile) -> ConfigFile:
    """Return the settings with GPT-NeoX's own names replaced by the usual ones."""
    defaults = {
        "rope_theta": config.number("rotary_emb_base", 10_000.0),
        "partial_rotary_factor": config.number("rotary_pct", 0.25),
        "attention_bias": True,
    }
    return ConfigFile(config.where, {**defaults, **config.fields, "num_key_value_heads": None})
