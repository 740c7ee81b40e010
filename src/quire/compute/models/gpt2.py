"""GPT-2: layer norms, biases everywhere, learned positions, matrices stored as [in, out].

The first checkpoints have the bare model: names without `transformer.`, and the causal mask of each layer
among the weights. `reorder_and_upcast_attn` concerns half precision in training. It has no effect in
float32, and quire computes scores in float32.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import HEAD_TENSOR, activation, divided_head_dim, num_layers
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.sublayers import AttentionSpec, MLPSpec

PREFIX: Final = "transformer."
LAYER: Final = PREFIX + "h.{layer}."


def decoder_spec(config: ConfigFile, max_length: int | None = None) -> DecoderSpec:
    """Return the spec of a GPT-2 model; refuses settings that quire does not interpret."""
    config.refuse("scale_attn_by_inverse_layer_idx", "add_cross_attention")
    hidden, heads = config.size("n_embd"), config.size("n_head")
    head_dim = divided_head_dim(config, "n_embd", "n_head")
    scale = head_dim**-0.5 if config.flag("scale_attn_weights", True) else 1.0
    layers = num_layers(config, "n_layer")
    return DecoderSpec(
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        context_length=config.size("n_positions", 1024),
        norm=NormSpec(NormKind.LAYER, config.number("layer_norm_epsilon", 1e-5)),
        attention=AttentionSpec(heads, heads, head_dim, scale, bias=True, output_bias=True),
        mlp=MLPSpec(
            config.size("n_inner", 4 * hidden),
            activation(config, "activation_function", "gelu_new"),
            gated=False,
            bias=True,
        ),
        layers=(LayerSpec(window=None, rope=None),) * layers,
        sources=_sources(hidden),
        ignored_tensors=_unused(layers),
        optional_prefix=PREFIX,
        tied_head=config.flag("tie_word_embeddings", True),
        learned_positions=0,
    )


def _sources(hidden: int) -> MappingProxyType[Part, WeightSource]:
    qkv = LAYER + "attn.c_attn"
    return MappingProxyType(
        {
            Part.EMBEDDING: WeightSource(PREFIX + "wte"),
            Part.POSITIONS: WeightSource(PREFIX + "wpe"),
            Part.ATTENTION_NORM: WeightSource(LAYER + "ln_1"),
            Part.QUERY: WeightSource(qkv, transposed=True),
            Part.KEY: WeightSource(qkv, first_row=hidden, transposed=True),
            Part.VALUE: WeightSource(qkv, first_row=2 * hidden, transposed=True),
            Part.OUTPUT: WeightSource(LAYER + "attn.c_proj", transposed=True),
            Part.MLP_NORM: WeightSource(LAYER + "ln_2"),
            Part.UP: WeightSource(LAYER + "mlp.c_fc", transposed=True),
            Part.DOWN: WeightSource(LAYER + "mlp.c_proj", transposed=True),
            Part.FINAL_NORM: WeightSource(PREFIX + "ln_f"),
            Part.HEAD: WeightSource("lm_head"),
        }
    )


def _unused(num_layers: int) -> frozenset[str]:
    masks = {
        LAYER.format(layer=layer) + f"attn.{name}" for layer in range(num_layers) for name in ("bias", "masked_bias")
    }
    return frozenset(masks | {HEAD_TENSOR})
