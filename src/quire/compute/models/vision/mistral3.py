"""The image encoder of Mistral Small 3.1 and 3.2, Ministral 3: Pixtral, whose patches are joined by a matrix first.

In a prompt, a token for the end of a row follows the placeholders of each row of squares. It is embedded like others.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec
from quire.compute.models.vision import pixtral
from quire.compute.models.vision.common import CLIP_DEVIATION, CLIP_MEAN, Normalization, placeholder_of
from quire.compute.models.vision.llava import PROJECTOR, projector, shortened
from quire.compute.models.vision.spec import Join, Matrix, Norm, VisionSpec

DEFAULTS: Final = MappingProxyType({**pixtral.DEFAULTS, "image_size": 1540, "patch_size": 14})
MAX_MERGE: Final = 16


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    vision.require("model_type", pixtral.PIXTRAL, None)
    merge = config.size("spatial_merge_size", 2, high=MAX_MERGE)
    patches, tower = pixtral.pixtral(vision, merge)
    size = tower.hidden_size
    pixels = Normalization.read(settings, CLIP_MEAN, CLIP_DEVIATION)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 10),
        patches=patches,
        tower=shortened(config, tower, pixtral.LAYER, usual=-1),
        connector=(
            Norm(PROJECTOR + "norm", NormSpec(NormKind.RMS, text.norm.epsilon), size),
            Join(merge**2, by_number=True),
            Matrix.of(PROJECTOR + "patch_merger.merging_layer", size, size * merge**2, bias=False),
            *projector(config, size, text.hidden_size, bias=False),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=(pixtral.TOWER, PROJECTOR),
    )
