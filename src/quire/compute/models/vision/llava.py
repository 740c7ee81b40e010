"""The image encoder of LLaVA 1.5: CLIP or SigLIP without its last layers, and an MLP of two layers.

CLIP's first row, which stands for the whole image, is computed with the others and then left out.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.compute.models.vision.common import (
    Normalization,
    activation,
    layer_stems,
    square_patches,
    vision_transformer,
)
from quire.compute.models.vision.spec import Matrix, Patches, Step, VisionSpec

CLIP: Final = "clip_vision_model"
SIGLIP: Final = "siglip_vision_model"
TOWER: Final = "vision_tower.vision_model."
PROJECTOR: Final = "multi_modal_projector."
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
CLIP_DEVIATION: Final = (0.26862954, 0.26130258, 0.27577711)
CLIP_DEFAULTS: Final = MappingProxyType(
    {
        **{"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
        **{"image_size": 224, "patch_size": 32},
    }
)
SIGLIP_DEFAULTS: Final = MappingProxyType({**CLIP_DEFAULTS, "patch_size": 16})


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config")
    vision.require("model_type", CLIP, SIGLIP, None)
    is_clip = vision.fields.get("model_type") != SIGLIP
    config.require("vision_feature_select_strategy", *(("default", None) if is_clip else ("full",)))
    patches, tower = _clip(vision.over(CLIP_DEFAULTS)) if is_clip else _siglip(vision.over(SIGLIP_DEFAULTS))
    pixels = Normalization.read(settings, CLIP_MEAN, CLIP_DEVIATION)
    return VisionSpec(
        placeholder=config.size("image_token_index", 32_000, low=0, high=text.vocab_size - 1),
        patches=patches,
        tower=_shortened(config, tower),
        connector=_projector(config, tower.hidden_size, text.hidden_size),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=("vision_tower.", PROJECTOR),
        optional_prefix=TOWER,
    )


def _clip(config: ConfigFile) -> tuple[Patches, DecoderSpec]:
    first = TOWER + "embeddings.class_embedding"
    patches = square_patches(config, TOWER + "embeddings.", 1, first=first, bias=False)
    stems = {**layer_stems(TOWER), Part.EMBEDDING_NORM: TOWER + "pre_layrnorm"}
    return patches, vision_transformer(config, stems, 1e-5, patches, "quick_gelu")


def _siglip(config: ConfigFile) -> tuple[Patches, DecoderSpec]:
    patches = square_patches(config, TOWER + "embeddings.", 1)
    return patches, vision_transformer(config, layer_stems(TOWER), 1e-6, patches, "gelu_pytorch_tanh")


def _shortened(config: ConfigFile, tower: DecoderSpec) -> DecoderSpec:
    """Return the tower without the layers after that whose states the text model reads."""
    field, count = "vision_feature_layer", len(tower.layers)
    index = config.fields.get(field, -2)
    if type(index) is not int or not 1 <= (used := index if index >= 0 else count + 1 + index) <= count:
        raise config.error(field, f"an integer from 1 to {count}, or from -{count} to -1")
    unused = [f"{TOWER}encoder.layers.{layer}." for layer in range(used, count)]
    return replace(
        tower.with_layers(used),
        ignored_tensors=frozenset({TOWER + "embeddings.position_ids"}),
        ignored_prefixes=(*unused, TOWER + "post_layernorm.", TOWER + "head."),
    )


def _projector(config: ConfigFile, size: int, text_size: int) -> tuple[Step, ...]:
    bias, active = config.flag("multimodal_projector_bias", True), activation(config, "projector_hidden_act", "gelu")
    return (
        Matrix.of(PROJECTOR + "linear_1", text_size, size, bias=bias, activation=active),
        Matrix.of(PROJECTOR + "linear_2", text_size, text_size, bias=bias),
    )
