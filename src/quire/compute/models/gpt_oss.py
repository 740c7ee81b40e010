"""gpt-oss: a sink in each softmax, a window in every other layer, and experts with biases and a clamped gate.

Its checkpoints have all experts of a layer in one tensor, with alternating rows of gate and up; `unstacked` gives each
expert its own matrices, whether they are floats or MXFP4. `intermediate_size` is the size of an expert.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.common import LAYER, llama_like, mixed_windows, num_layers, rotary_layers, with_stems
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.qwen3_moe import EXPERT
from quire.compute.models.sublayers import MAX_EXPERTS, Activation, ExpertsSpec

YARN: Final = MappingProxyType(
    {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)
DEFAULTS: Final = MappingProxyType(
    {
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.SINKS: LAYER + "self_attn.sinks",
        Part.ROUTER: LAYER + "mlp.router",
        Part.EXPERT_GATE: EXPERT + "gate_proj",
        Part.EXPERT_UP: EXPERT + "up_proj",
        Part.EXPERT_DOWN: EXPERT + "down_proj",
    }
)
FACTOR: Final = 1.702
LIMIT: Final = 7.0


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a gpt-oss model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    if not (config.is_set("rope_parameters") or config.is_set("rope_scaling")):
        config = ConfigFile(config.where, {**config.fields, "rope_scaling": dict(YARN)})
    for field, value in (("swiglu_alpha", FACTOR), ("swiglu_limit", LIMIT)):
        if config.number(field, value) != value:
            raise config.error(field, f"{value:g}")
    config.require("hidden_act", "silu", None)
    window = config.size("sliding_window", high=MAX_LENGTH)
    windows = mixed_windows(config, window, lambda layer: layer % 2 == 0)
    spec = with_stems(llama_like(config, max_length, rotary_layers(config, max_length, windows)), STEMS)
    return replace(
        spec,
        layers=tuple(replace(layer, sparse=True) for layer in spec.layers),
        attention=replace(spec.attention, sinks=True),
        mlp=replace(spec.mlp, activation=Activation.CLAMPED_SWIGLU),
        experts=_experts(config),
    )


def _experts(config: ConfigFile) -> ExpertsSpec:
    num_experts = config.size("num_local_experts", high=MAX_EXPERTS // num_layers(config))
    return ExpertsSpec(
        num_experts=num_experts,
        experts_per_token=config.size("num_experts_per_tok", 4, high=num_experts),
        intermediate_size=config.size("intermediate_size"),
        normalize_weights=True,
        bias=True,
    )
