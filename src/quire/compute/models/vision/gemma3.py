"""The image encoder of Gemma 3: SigLIP, the average of each square of its patches, a norm and a matrix.

The text model reads the tokens of an image at once: each of them attends to all of them.
"""

from __future__ import annotations

from math import isqrt
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.vision.common import HALF, Normalization, placeholder_of
from quire.compute.models.vision.llava import PROJECTOR, SIGLIP, SIGLIP_DEFAULTS, TOWER, siglip
from quire.compute.models.vision.spec import MAX_PATCHES, Average, Matrix, Norm, VisionSpec

DEFAULTS: Final = MappingProxyType({**SIGLIP_DEFAULTS, "layer_norm_eps": 1e-6})


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    vision.require("model_type", SIGLIP, None)
    num_tokens = config.size("mm_tokens_per_image", 256, high=MAX_PATCHES)
    side = isqrt(num_tokens)
    patches_a_side = vision.size("image_size") // vision.size("patch_size")
    if side**2 != num_tokens or patches_a_side % side:
        raise config.error("mm_tokens_per_image", f"a square, with a root that divides {patches_a_side}")
    merge = patches_a_side // side
    patches, tower = siglip(vision, merge, final_norm=True)
    size = tower.hidden_size
    pixels = Normalization.read(settings, HALF, HALF)
    has_offset = config.flag("rms_norm_unit_offset", True)  # GGUF files include the 1
    norm = NormSpec(NormKind.RMS, tower.norm.epsilon, unit_offset=has_offset)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 262_144),
        patches=patches,
        tower=tower,
        connector=(
            Average(merge**2),
            Norm(PROJECTOR + "mm_soft_emb_norm", norm, size),
            Matrix(PROJECTOR + "mm_input_projection_weight", (size, text.hidden_size), transposed=True),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=("vision_tower.", PROJECTOR),
        optional_prefix=TOWER,
    )
