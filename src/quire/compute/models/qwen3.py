"""Qwen3: Llama with an RMS norm on every query and key head, and windows in some layers.

`head_dim` is a setting of its own: Qwen3-0.6B has hidden size 1024, 16 heads and head_dim 128, so
hidden size / heads would be wrong. Layers from `max_window_layers` on see a sliding window, where
`use_sliding_window` says so and `layer_types` does not say otherwise.
"""

from __future__ import annotations

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
)
from quire.compute.models.common import LAYER, llama_sources, num_layers, unused_tensors
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import context_length, rope_spec

SOURCES: Final = llama_sources({Part.QUERY_NORM: LAYER + "self_attn.q_norm", Part.KEY_NORM: LAYER + "self_attn.k_norm"})
DEFAULT_HEAD_DIM: Final = 128


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Qwen3 model; settings that nothing interprets are refused."""
    config.require("hidden_act", "silu", None)
    tied = config.flag("tie_word_embeddings", False)
    norm = NormSpec(NormKind.RMS, config.number("rms_norm_eps", 1e-6))
    attention = _attention(config, norm)
    windows = _windows(config)
    rope = rope_spec(config, attention.head_dim, max_length)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        context_length=context_length(config, max_length),
        norm=norm,
        attention=attention,
        mlp=MLPSpec(config.size("intermediate_size"), Activation.SILU),
        layers=tuple(LayerSpec(window, rope) for window in windows),
        sources=SOURCES,
        ignored_tensors=unused_tensors(len(windows), tied_head=tied),
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


def _windows(config: ConfigFile) -> list[int | None]:
    """Return the window of each layer, None where it sees everything."""
    count = num_layers(config)
    use_windows = config.flag("use_sliding_window", False) and config.is_set("sliding_window")
    window = config.size("sliding_window") if use_windows else None
    if not config.is_set("layer_types"):
        first = config.size("max_window_layers", 28, low=0)
        return [window if layer >= first else None for layer in range(count)]
    kinds = config.texts("layer_types")
    if len(kinds) != count or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        raise config.error("layer_types", f"{count} of full_attention, sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise config.error("sliding_window", "a window, with use_sliding_window, for sliding layers")
    return [window if kind == "sliding_attention" else None for kind in kinds]
