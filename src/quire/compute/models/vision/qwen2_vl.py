"""The image encoder of Qwen2-VL: a tower whose positions rotate by row and column, and an MLP of squares of patches.

The first half of the pairs of a head rotates by the row of a patch, the second half by its column, with the same
frequencies. A patch of a video has two frames; of an image, both are the same.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import divided_head_dim, num_layers, stem_sources
from quire.compute.models.config_file import MAX_LENGTH, ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.rope import plain_frequencies
from quire.compute.models.sublayers import Activation, AttentionSpec, MLPSpec
from quire.compute.models.vision.common import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    Frequencies,
    Normalization,
    activation,
    grid_rope,
    require_colours,
)
from quire.compute.models.vision.spec import MAX_PATCH_SIZE, MAX_PATCHES, Join, Matrix, Norm, Patches, VisionSpec
from quire.core.images import CHANNELS

VISUAL: Final = "visual."
LAYER: Final = VISUAL + "blocks.{layer}."
DEFAULTS: Final = MappingProxyType(
    {
        **{"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4, "patch_size": 14},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2},
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.ATTENTION_NORM: LAYER + "norm1",
        Part.OUTPUT: LAYER + "attn.proj",
        Part.MLP_NORM: LAYER + "norm2",
        Part.UP: LAYER + "mlp.fc1",
        Part.DOWN: LAYER + "mlp.fc2",
    }
)
EPSILON: Final = 1e-6
USUAL_MAX_PIXELS: Final = 28 * 28 * 1280
MAX_MERGE: Final = 16
MAX_FRAMES: Final = 16
MAX_RATIO: Final = 64


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    merge = vision.size("spatial_merge_size", high=MAX_MERGE)
    if not any(layer.rope is not None and layer.rope.axes for layer in text.layers):
        raise config.error("rope_scaling", "sections for time, height and width")
    patches = _patches(vision, settings, merge)
    tower = _tower(vision, patches)
    joined, merger = tower.hidden_size * merge**2, VISUAL + "merger."
    pixels = Normalization.read(settings, CLIP_MEAN, CLIP_DEVIATION)
    return VisionSpec(
        placeholder=config.size("image_token_id", 151_655, low=0, high=text.vocab_size - 1),
        patches=patches,
        tower=tower,
        connector=(
            Norm(merger + "ln_q", NormSpec(NormKind.LAYER, EPSILON), tower.hidden_size),
            Join(merge**2),
            Matrix.of(merger + "mlp.0", joined, joined, bias=True, activation=Activation.GELU),
            Matrix.of(merger + "mlp.2", text.hidden_size, joined, bias=True),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=(VISUAL,),
        has_axes=True,
    )


def _patches(vision: ConfigFile, settings: ConfigFile, merge: int) -> Patches:
    """Return the patches of images of any size, with at most the pixels that the makers and quire allow."""
    require_colours(vision, "in_channels")
    size, frames = vision.size("patch_size", high=MAX_PATCH_SIZE), vision.size("temporal_patch_size", high=MAX_FRAMES)
    sizes, unit = settings.section("size"), size * merge
    most = settings.size("max_pixels", sizes.size("longest_edge", USUAL_MAX_PIXELS, high=MAX_LENGTH), high=MAX_LENGTH)
    max_patches = min(MAX_PATCHES, max(most, unit**2) // size**2)
    shape = (vision.size("embed_dim"), CHANNELS, frames, size, size)
    return Patches(size, merge, Matrix(VISUAL + "patch_embed.proj.weight", shape), None, max_patches, frames=frames)


def _tower(config: ConfigFile, patches: Patches) -> DecoderSpec:
    size, heads = config.size("embed_dim"), config.size("num_heads")
    head_dim = divided_head_dim(config, "embed_dim", "num_heads")
    if head_dim % 4:
        raise config.error("embed_dim", "a multiple of 4 × num_heads")

    def frequencies(base: float) -> tuple[Frequencies, Frequencies]:
        usual = plain_frequencies(base, head_dim // 2)
        return usual, usual

    rows = {
        part: WeightSource(LAYER + "attn.qkv", first_row=index * size)
        for index, part in enumerate((Part.QUERY, Part.KEY, Part.VALUE))
    }
    inner = config.size("mlp_ratio", high=MAX_RATIO) * size
    return DecoderSpec(
        vocab_size=0,
        hidden_size=size,
        context_length=patches.max_rows,
        norm=NormSpec(NormKind.LAYER, EPSILON),
        attention=AttentionSpec(
            heads, heads, head_dim, head_dim**-0.5, bias=True, output_bias=True, bidirectional=True
        ),
        mlp=MLPSpec(inner, activation(config, "hidden_act", "quick_gelu"), gated=False, bias=True),
        layers=(LayerSpec(window=None, rope=grid_rope(config, frequencies)),) * num_layers(config, "depth"),
        sources=MappingProxyType({**stem_sources(STEMS), **rows}),
        tied_head=True,
        final_norm=False,
    )
