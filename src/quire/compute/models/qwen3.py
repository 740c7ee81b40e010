"""Qwen3: RMS norms, one on every query and key head too, rotary positions, a gated MLP.

`head_dim` is a setting of its own: Qwen3-0.6B has hidden size 1024, 16 heads and head_dim 128, so
hidden size / heads would be wrong. The settings of rotary positions stand at the top level in
transformers 4 (`rope_theta`, `rope_scaling`) and in `rope_parameters` in transformers 5. Layers
from `max_window_layers` on see a sliding window, where `use_sliding_window` says so and
`layer_types` does not say otherwise.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormKind,
    NormSpec,
    Part,
    RopeSpec,
)
from quire.compute.models.config_file import ConfigFile

NAMES: Final = MappingProxyType(
    {
        Part.EMBEDDING: "model.embed_tokens",
        Part.ATTENTION_NORM: "model.layers.{layer}.input_layernorm",
        Part.QUERY: "model.layers.{layer}.self_attn.q_proj",
        Part.KEY: "model.layers.{layer}.self_attn.k_proj",
        Part.VALUE: "model.layers.{layer}.self_attn.v_proj",
        Part.QUERY_NORM: "model.layers.{layer}.self_attn.q_norm",
        Part.KEY_NORM: "model.layers.{layer}.self_attn.k_norm",
        Part.OUTPUT: "model.layers.{layer}.self_attn.o_proj",
        Part.MLP_NORM: "model.layers.{layer}.post_attention_layernorm",
        Part.GATE: "model.layers.{layer}.mlp.gate_proj",
        Part.UP: "model.layers.{layer}.mlp.up_proj",
        Part.DOWN: "model.layers.{layer}.mlp.down_proj",
        Part.FINAL_NORM: "model.norm",
        Part.HEAD: "lm_head",
    }
)
HEAD_TENSOR: Final = "lm_head.weight"
MAX_LAYERS: Final = 10_000
DEFAULT_HEAD_DIM: Final = 128
DEFAULT_ROPE_BASE: Final = 10_000.0


def decoder_spec(config: ConfigFile) -> DecoderSpec:
    """Return the spec of a Qwen3 model; settings that nothing interprets are refused."""
    config.require("hidden_act", "silu", None)
    tied = config.flag("tie_word_embeddings", False)
    norm = NormSpec(NormKind.RMS, config.number("rms_norm_eps", 1e-6))
    attention = _attention(config, norm)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        context_length=config.size("max_position_embeddings"),
        norm=norm,
        attention=attention,
        mlp=MLPSpec(config.size("intermediate_size"), Activation.SILU),
        layers=_layers(config, attention.head_dim),
        names=NAMES,
        ignored_tensors=frozenset({HEAD_TENSOR} if tied else ()),
        tied_head=tied,
    )


def _attention(config: ConfigFile, norm: NormSpec) -> AttentionSpec:
    num_heads = config.size("num_attention_heads")
    head_dim = config.size("head_dim", DEFAULT_HEAD_DIM)
    bias = config.flag("attention_bias", False)
    return AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=config.size("num_key_value_heads", num_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        bias=bias,
        output_bias=bias,
        qk_norm=norm,
    )


def _layers(config: ConfigFile, head_dim: int) -> tuple[LayerSpec, ...]:
    rope = RopeSpec(_rope_base(config), head_dim)
    return tuple(LayerSpec(window, rope) for window in _windows(config))


def _windows(config: ConfigFile) -> list[int | None]:
    """Return the window of each layer, None where it sees everything."""
    num_layers = config.size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise config.error("num_hidden_layers", f"at most {MAX_LAYERS}")
    use_windows = config.flag("use_sliding_window", False) and config.is_set("sliding_window")
    window = config.size("sliding_window") if use_windows else None
    if not config.is_set("layer_types"):
        first = config.size("max_window_layers", 28, low=0)
        return [window if layer >= first else None for layer in range(num_layers)]
    kinds = config.texts("layer_types")
    if len(kinds) != num_layers or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        raise config.error("layer_types", f"{num_layers} of full_attention, sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise config.error("sliding_window", "a window, with use_sliding_window, for sliding layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _rope_base(config: ConfigFile) -> float:
    for field in ("rope_parameters", "rope_scaling"):
        scaling = config.section(field)
        scaling.require("rope_type", "default", None)
        scaling.require("type", "default", None)
    parameters = config.section("rope_parameters")
    return parameters.number("rope_theta", config.number("rope_theta", DEFAULT_ROPE_BASE))
