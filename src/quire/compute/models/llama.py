"""Llama 2 and 3: RMS norms before each sublayer, rotary positions, a gated MLP, no window.

Llama 2 is Llama 3 with as many key-value heads as heads and without scaled positions. `head_dim` is
a setting of its own in newer configs (Llama 3.2), else hidden size / heads. `pretraining_tp` other
than 1 splits the matrix products in another order than ours, and no published model needs it.
"""

from __future__ import annotations

from quire.compute.models.base import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MLPSpec,
    NormKind,
    NormSpec,
)
from quire.compute.models.common import head_dim, llama_sources, num_layers, unused_tensors
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.rope import context_length, rope_spec


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a Llama model; settings that nothing interprets are refused."""
    config.require("hidden_act", "silu", None)
    if config.size("pretraining_tp", 1) != 1:
        raise config.error("pretraining_tp", "1")
    attention = _attention(config)
    layer = LayerSpec(window=None, rope=rope_spec(config, attention.head_dim, max_length))
    mlp_bias = config.flag("mlp_bias", False)
    layers = num_layers(config)
    tied = config.flag("tie_word_embeddings", False)
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=config.size("hidden_size"),
        context_length=context_length(config, max_length),
        norm=NormSpec(NormKind.RMS, config.number("rms_norm_eps", 1e-6)),
        attention=attention,
        mlp=MLPSpec(config.size("intermediate_size"), Activation.SILU, bias=mlp_bias),
        layers=(layer,) * layers,
        sources=llama_sources(),
        ignored_tensors=unused_tensors(layers, tied_head=tied),
        tied_head=tied,
    )


def _attention(config: ConfigFile) -> AttentionSpec:
    heads, size = config.size("num_attention_heads"), head_dim(config)
    bias = config.flag("attention_bias", False)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", heads),
        head_dim=size,
        scale=size**-0.5,
        bias=bias,
        output_bias=bias,
    )
