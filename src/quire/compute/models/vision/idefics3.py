"""The image encoder of Idefics 3 and SmolVLM: SigLIP; squares of its patches become one row each.

The makers' processor cuts an image into tiles, all of one size. Each of them is an image for the encoder.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.vision.common import (
    HALF,
    Normalization,
    layer_stems,
    placeholder_of,
    square_patches,
    vision_transformer,
)
from quire.compute.models.vision.spec import Join, Matrix, VisionSpec

DEFAULTS: Final = MappingProxyType(
    {
        **{"hidden_size": 1152, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 16},
        **{"image_size": 224, "patch_size": 32},
    }
)
TOWER: Final = "model.vision_model."
CONNECTOR: Final = "model.connector."


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    merge = config.size("scale_factor", 2, high=16)
    patches = square_patches(vision, TOWER + "embeddings.", merge)
    stems = {**layer_stems(TOWER), Part.FINAL_NORM: TOWER + "post_layernorm"}
    tower = vision_transformer(vision, stems, 1e-6, patches, "gelu_pytorch_tanh")
    joined = tower.hidden_size * merge**2
    pixels = Normalization.read(settings, HALF, HALF)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 128_257),
        patches=patches,
        tower=tower,
        connector=(
            Join(merge**2),
            Matrix.of(CONNECTOR + "modality_projection.proj", text.hidden_size, joined, bias=False),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=(TOWER, CONNECTOR),
    )
