"""Pixtral: images of any size, positions that rotate by row and column, and layers like Mistral's.

The first half of the pairs of a head rotates by the row of a patch, with every other frequency of the usual ones; the
second half by its column, with the rest.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import divided_head_dim, num_layers, stem_sources
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.rope import plain_frequencies
from quire.compute.models.sublayers import AttentionSpec, MLPSpec
from quire.compute.models.vision.common import Frequencies, activation, grid_rope, require_colours
from quire.compute.models.vision.spec import MAX_IMAGE_SIZE, MAX_PATCH_SIZE, MAX_PATCHES, Matrix, Patches
from quire.core.images import CHANNELS

PIXTRAL: Final = "pixtral"
TOWER: Final = "vision_tower."
DEFAULTS: Final = MappingProxyType(
    {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"image_size": 1024, "patch_size": 16},
    }
)
LAYER: Final = TOWER + "transformer.layers.{layer}."
STEMS: Final = MappingProxyType(
    {
        Part.EMBEDDING_NORM: TOWER + "ln_pre",
        Part.ATTENTION_NORM: LAYER + "attention_norm",
        Part.QUERY: LAYER + "attention.q_proj",
        Part.KEY: LAYER + "attention.k_proj",
        Part.VALUE: LAYER + "attention.v_proj",
        Part.OUTPUT: LAYER + "attention.o_proj",
        Part.MLP_NORM: LAYER + "ffn_norm",
        Part.GATE: LAYER + "feed_forward.gate_proj",
        Part.UP: LAYER + "feed_forward.up_proj",
        Part.DOWN: LAYER + "feed_forward.down_proj",
    }
)
EPSILON: Final = 1e-5


def pixtral(config: ConfigFile, merge: int) -> tuple[Patches, DecoderSpec]:
    """Return the patches and the tower; squares of `merge` × `merge` patches are joined behind it."""
    require_colours(config)
    size = config.size("patch_size", high=MAX_PATCH_SIZE)
    side = config.size("image_size", low=size * merge, high=MAX_IMAGE_SIZE) // size
    if side**2 > MAX_PATCHES:
        raise config.error("image_size", f"at most {MAX_PATCHES} patches")
    matrix = Matrix(TOWER + "patch_conv.weight", (config.size("hidden_size"), CHANNELS, size, size))
    patches = Patches(size, merge, matrix, None, side**2)
    heads, head_dim = config.size("num_attention_heads"), divided_head_dim(config, "hidden_size", "num_attention_heads")
    if head_dim % 4 or config.size("head_dim", head_dim) != head_dim:
        raise config.error("head_dim", f"{head_dim}, the hidden size divided by the heads, and a multiple of 4")

    def frequencies(base: float) -> tuple[Frequencies, Frequencies]:
        usual = plain_frequencies(base, head_dim)
        return usual[::2], usual[1::2]

    layer = LayerSpec(window=None, rope=grid_rope(config, frequencies))
    return patches, DecoderSpec(
        vocab_size=0,
        hidden_size=config.size("hidden_size"),
        context_length=patches.max_rows,
        norm=NormSpec(NormKind.RMS, EPSILON),
        attention=AttentionSpec(heads, heads, head_dim, head_dim**-0.5, bidirectional=True),
        mlp=MLPSpec(config.size("intermediate_size"), activation(config, "hidden_act", "gelu")),
        layers=(layer,) * num_layers(config),
        sources=stem_sources(STEMS),
        tied_head=True,
        final_norm=False,
        embedding_norm=True,
    )
