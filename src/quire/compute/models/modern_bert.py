"""ModernBERT: an encoder with norms before its sublayers, a gated MLP, and a window in two of three layers.

Layers with a window have rotary positions with another base. `local_attention` counts the tokens on both sides of a
token together. The first layer reads the norm of the embedding, and has none before its attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import activation, divided_head_dim, mixed_windows
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.rope import FULL, SLIDING, full_and_sliding_ropes
from quire.compute.models.sublayers import AttentionSpec, MLPSpec

PREFIX: Final = "model."
LAYER: Final = PREFIX + "layers.{layer}."
HEADS: Final = ("classifier.", "decoder.", "head.")
"""What follows the last layer in checkpoints for other uses."""

BASE: Final = 160_000.0
LOCAL_BASE: Final = 10_000.0
DEFAULTS: Final = MappingProxyType(
    {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": BASE,
        "local_attention": 128,
        "local_rope_theta": LOCAL_BASE,
        "max_position_embeddings": 8192,
    }
)


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a ModernBERT model; refuses settings that quire does not interpret."""
    config = config.over(DEFAULTS)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    head_dim = divided_head_dim(config, "hidden_size", "num_attention_heads")
    if config.size("head_dim", head_dim) != head_dim:
        raise config.error("head_dim", f"{head_dim}, the hidden size divided by the number of heads")
    bias, inner = config.flag("attention_bias", False), config.size("intermediate_size")
    mlp = MLPSpec(inner, activation(config, "hidden_activation", "gelu"), bias=config.flag("mlp_bias", False))
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        context_length=config.size("max_position_embeddings", high=MAX_LENGTH),
        norm=norm_spec(config),
        attention=AttentionSpec(
            heads, heads, head_dim, head_dim**-0.5, bias=bias, output_bias=bias, bidirectional=True
        ),
        mlp=mlp,
        layers=tuple(_layers(config, head_dim, max_length)),
        sources=_sources(hidden, inner),
        ignored_prefixes=HEADS,
        optional_prefix=PREFIX,
        tied_head=True,
        embedding_norm=True,
    )


def norm_spec(config: ConfigFile) -> NormSpec:
    """Return the norms of a model, also of its head."""
    return NormSpec(NormKind.LAYER, config.number("norm_eps", 1e-5), bias=config.flag("norm_bias", False))


def _layers(config: ConfigFile, head_dim: int, max_length: int | None) -> Iterator[LayerSpec]:
    bases = {FULL: config.number("global_rope_theta"), SLIDING: config.number("local_rope_theta")}
    if not config.is_set("rope_parameters"):
        own = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
        config = ConfigFile(config.where, {**config.fields, "rope_parameters": own})
    full, near = full_and_sliding_ropes(config, head_dim, max_length, base=bases[FULL], sliding_base=bases[SLIDING])
    window = config.size("local_attention", high=MAX_LENGTH) // 2 + 1
    interval = config.size("global_attn_every_n_layers")
    for index, each in enumerate(mixed_windows(config, window, lambda layer: layer % interval > 0)):
        layer = LayerSpec(each, full if each is None else near)
        yield layer if index else replace(layer, attention_norm=False)


def _sources(hidden: int, inner: int) -> MappingProxyType[Part, WeightSource]:
    qkv, up = LAYER + "attn.Wqkv", LAYER + "mlp.Wi"
    return MappingProxyType(
        {
            Part.EMBEDDING: WeightSource(PREFIX + "embeddings.tok_embeddings"),
            Part.EMBEDDING_NORM: WeightSource(PREFIX + "embeddings.norm"),
            Part.ATTENTION_NORM: WeightSource(LAYER + "attn_norm"),
            Part.QUERY: WeightSource(qkv),
            Part.KEY: WeightSource(qkv, first_row=hidden),
            Part.VALUE: WeightSource(qkv, first_row=2 * hidden),
            Part.OUTPUT: WeightSource(LAYER + "attn.Wo"),
            Part.MLP_NORM: WeightSource(LAYER + "mlp_norm"),
            Part.GATE: WeightSource(up),
            Part.UP: WeightSource(up, first_row=inner),
            Part.DOWN: WeightSource(LAYER + "mlp.Wo"),
            Part.FINAL_NORM: WeightSource(PREFIX + "final_norm"),
        }
    )
