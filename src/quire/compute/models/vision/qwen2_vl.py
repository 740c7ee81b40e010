"""The image encoder of Qwen2-VL: a tower whose positions rotate by row and column, and an MLP of squares of patches.

The first half of the pairs of a head rotates by the row of a patch, the second half by its column, with the same
frequencies. A patch of a video has two frames; of an image, both are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.common import MAX_HEAD_DIM, MAX_HEADS, num_layers, stem_sources
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
    placeholder_of,
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
    merge, size = vision.size("spatial_merge_size", high=MAX_MERGE), vision.size("embed_dim")
    patches = moving_patches(vision, settings, VISUAL, merge, size, USUAL_MAX_PIXELS)
    inner = vision.size("mlp_ratio", high=MAX_RATIO) * size
    return with_merger(config, settings, text, patches, grid_tower(vision, patches, LAYER, STEMS, inner))


def with_merger(
    config: ConfigFile, settings: ConfigFile, text: DecoderSpec, patches: Patches, tower: DecoderSpec
) -> VisionSpec:
    """Return the spec of an encoder with this tower, and an MLP that joins squares of patches."""
    if not any(layer.rope is not None and layer.rope.axes for layer in text.layers):
        raise config.error("rope_scaling", "sections for time, height and width")
    joined, merger = tower.hidden_size * patches.merge**2, VISUAL + "merger."
    pixels = Normalization.read(settings, CLIP_MEAN, CLIP_DEVIATION)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 151_655),
        patches=patches,
        tower=tower,
        connector=(
            Norm(merger + "ln_q", tower.norm, tower.hidden_size),
            Join(patches.merge**2),
            Matrix.of(merger + "mlp.0", joined, joined, bias=True, activation=Activation.GELU),
            Matrix.of(merger + "mlp.2", text.hidden_size, joined, bias=True),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=(VISUAL,),
        has_axes=True,
    )


def moving_patches(
    vision: ConfigFile, settings: ConfigFile, prefix: str, merge: int, hidden_size: int, usual_max: int
) -> Patches:
    """Return the patches of images of any size, of several frames, with the most pixels that makers and quire allow.

    `usual_max`: the most pixels by default.
    """
    require_colours(vision, "in_channels")
    size, frames = vision.size("patch_size", high=MAX_PATCH_SIZE), vision.size("temporal_patch_size", high=MAX_FRAMES)
    sizes, unit = settings.section("size"), size * merge
    most = settings.size("max_pixels", sizes.size("longest_edge", usual_max, high=MAX_LENGTH), high=MAX_LENGTH)
    max_patches = min(MAX_PATCHES, max(most, unit**2) // size**2)
    matrix = Matrix(prefix + "patch_embed.proj.weight", (hidden_size, CHANNELS, frames, size, size))
    return Patches(size, merge, matrix, None, max_patches, frames=frames)


def grid_tower(
    config: ConfigFile, patches: Patches, layer: str, stems: Mapping[Part, str], intermediate_size: int
) -> DecoderSpec:
    """Return a tower whose heads rotate by row and column; `layer` begins the names of its tensors."""
    size, heads = patches.matrix.num_outputs, config.size("num_heads", high=MAX_HEADS)
    head_dim = size // heads
    if size % (4 * heads) or head_dim > MAX_HEAD_DIM:
        allowed = f"a number of heads that each have a multiple of 4 of the {size} numbers, at most {MAX_HEAD_DIM}"
        raise config.error("num_heads", allowed)

    def frequencies(base: float) -> tuple[Frequencies, Frequencies]:
        usual = plain_frequencies(base, head_dim // 2)
        return usual, usual

    rows = {
        part: WeightSource(layer + "attn.qkv", first_row=index * size)
        for index, part in enumerate((Part.QUERY, Part.KEY, Part.VALUE))
    }
    return DecoderSpec(
        vocab_size=0,
        hidden_size=size,
        context_length=patches.max_rows,
        norm=NormSpec(NormKind.LAYER, EPSILON),
        attention=AttentionSpec(
            heads, heads, head_dim, head_dim**-0.5, bias=True, output_bias=True, bidirectional=True
        ),
        mlp=MLPSpec(intermediate_size, activation(config, "hidden_act", "quick_gelu"), gated=False, bias=True),
        layers=(LayerSpec(window=None, rope=grid_rope(config, frequencies)),) * num_layers(config, "depth"),
        sources=MappingProxyType({**stem_sources(stems), **rows}),
        tied_head=True,
        final_norm=False,
    )
