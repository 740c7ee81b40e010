"""The image encoder of LFM2-VL: SigLIP 2, whose table of positions is resized to the grid of each image.

The numbers of a patch are pixel by pixel, each with its colours. Squares of patches are joined before an MLP.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.vision.common import (
    HALF,
    Normalization,
    activation,
    layer_stems,
    placeholder_of,
    require_colours,
    vision_transformer,
)
from quire.compute.models.vision.spec import (
    MAX_IMAGE_SIZE,
    MAX_PATCH_SIZE,
    MAX_PATCHES,
    Join,
    Matrix,
    Norm,
    Patches,
    VisionSpec,
)
from quire.core.images import CHANNELS

SIGLIP2: Final = "siglip2_vision_model"
TOWER: Final = "model.vision_tower.vision_model."
PROJECTOR: Final = "model.multi_modal_projector."
DEFAULTS: Final = MappingProxyType(
    {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"num_patches": 256, "patch_size": 16},
    }
)
EPSILON: Final = 1e-5
MAX_MERGE: Final = 16


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    vision.require("model_type", SIGLIP2, None)
    merge = config.size("downsample_factor", 2, high=MAX_MERGE)
    patches = _patches(vision, settings.over(config.fields), merge)
    tower = vision_transformer(
        vision, {**layer_stems(TOWER), Part.FINAL_NORM: TOWER + "post_layernorm"}, 1e-6, patches, "gelu_pytorch_tanh"
    )
    joined, inner = tower.hidden_size * merge**2, config.size("projector_hidden_size", 2560)
    bias, active = config.flag("projector_bias", True), activation(config, "projector_hidden_act", "gelu")
    norm = Norm(PROJECTOR + "layer_norm", NormSpec(NormKind.LAYER, EPSILON), joined)
    pixels = Normalization.read(settings, HALF, HALF)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 396),
        patches=patches,
        tower=replace(tower, ignored_prefixes=(TOWER + "head.",)),
        connector=(
            Join(merge**2),
            *((norm,) if config.flag("projector_use_layernorm", True) else ()),
            Matrix.of(PROJECTOR + "linear_1", inner, joined, bias=bias, activation=active),
            Matrix.of(PROJECTOR + "linear_2", text.hidden_size, inner, bias=bias),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=("model.vision_tower.", PROJECTOR),
        optional_prefix=TOWER,
    )


def _patches(vision: ConfigFile, settings: ConfigFile, merge: int) -> Patches:
    """Return the patches; an image is a tile, or a whole image with a limited number of tokens."""
    require_colours(vision)
    size, num_positions = vision.size("patch_size", high=MAX_PATCH_SIZE), vision.size("num_patches", high=MAX_PATCHES)
    side = isqrt(num_positions)
    if side**2 != num_positions:
        raise vision.error("num_patches", "a square")
    in_image = settings.size("max_image_tokens", 256, high=MAX_PATCHES) * merge**2
    in_tile = (settings.size("tile_size", 512, high=MAX_IMAGE_SIZE) // size) ** 2
    if max(in_image, in_tile) > MAX_PATCHES:
        raise settings.error("max_image_tokens", f"at most {MAX_PATCHES} patches, in a tile too")
    stem = TOWER + "embeddings.patch_embedding"
    return Patches(
        size,
        merge,
        Matrix.of(stem, vision.size("hidden_size"), CHANNELS * size**2, bias=True),
        None,
        max(in_image, in_tile),
        positions=TOWER + "embeddings.position_embedding.weight",
        positions_side=side,
        colours_last=True,
    )
