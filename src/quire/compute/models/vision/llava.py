"""The image encoder of LLaVA 1.5: CLIP, SigLIP or Pixtral without its last layers, and an MLP of two layers.

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
    CLIP_DEVIATION,
    CLIP_MEAN,
    Normalization,
    activation,
    layer_stems,
    placeholder_of,
    square_patches,
    vision_transformer,
)
from quire.compute.models.vision.pixtral import DEFAULTS, PIXTRAL, pixtral
from quire.compute.models.vision.pixtral import LAYER as PIXTRAL_LAYER
from quire.compute.models.vision.spec import Matrix, Patches, Step, VisionSpec

CLIP: Final = "clip_vision_model"
SIGLIP: Final = "siglip_vision_model"
TOWER: Final = "vision_tower.vision_model."
LAYER: Final = TOWER + "encoder.layers.{layer}."
PROJECTOR: Final = "multi_modal_projector."
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
    vision.require("model_type", CLIP, SIGLIP, PIXTRAL, None)
    kind = str(vision.fields.get("model_type") or CLIP)
    config.require("vision_feature_select_strategy", *(("default", None) if kind == CLIP else ("full",)))
    if kind == CLIP:
        patches, tower = _clip(vision.over(CLIP_DEFAULTS))
    elif kind == SIGLIP:
        patches, tower = siglip(vision.over(SIGLIP_DEFAULTS), 1)
    else:
        patches, tower = pixtral(vision.over(DEFAULTS), 1)
    middle = (0.5, 0.5, 0.5)
    usual = (middle, middle) if kind == SIGLIP else (CLIP_MEAN, CLIP_DEVIATION)
    pixels = Normalization.read(settings, *usual)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 32_000),
        patches=patches,
        tower=shortened(config, tower, PIXTRAL_LAYER if kind == PIXTRAL else LAYER, usual=-2),
        connector=projector(config, tower.hidden_size, text.hidden_size, bias=True),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=("vision_tower.", PROJECTOR),
        optional_prefix="" if kind == PIXTRAL else TOWER,
    )


def _clip(config: ConfigFile) -> tuple[Patches, DecoderSpec]:
    first = TOWER + "embeddings.class_embedding"
    patches = square_patches(config, TOWER + "embeddings.", 1, first=first, bias=False)
    stems = {**layer_stems(TOWER), Part.EMBEDDING_NORM: TOWER + "pre_layrnorm"}
    return patches, _whole(vision_transformer(config, stems, 1e-5, patches, "quick_gelu"))


def siglip(config: ConfigFile, merge: int, *, final_norm: bool = False) -> tuple[Patches, DecoderSpec]:
    """Return the patches and the tower of SigLIP, with the norm after its layers or without it."""
    patches = square_patches(config, TOWER + "embeddings.", merge)
    stems = {**layer_stems(TOWER), **({Part.FINAL_NORM: TOWER + "post_layernorm"} if final_norm else {})}
    return patches, _whole(vision_transformer(config, stems, 1e-6, patches, "gelu_pytorch_tanh"))


def _whole(tower: DecoderSpec) -> DecoderSpec:
    """Return the tower in a file that also has what other uses of the encoder need."""
    norm = () if tower.final_norm else (TOWER + "post_layernorm.",)
    return replace(
        tower,
        ignored_tensors=frozenset({TOWER + "embeddings.position_ids"}),
        ignored_prefixes=(*norm, TOWER + "head."),
    )


def shortened(config: ConfigFile, tower: DecoderSpec, layer: str, *, usual: int) -> DecoderSpec:
    """Return the tower without the layers after that whose states the text model reads; `layer` names their tensors."""
    field, count = "vision_feature_layer", len(tower.layers)
    index = config.fields.get(field, usual)
    if type(index) is not int or not 1 <= (used := index if index >= 0 else count + 1 + index) <= count:
        raise config.error(field, f"an integer from 1 to {count}, or from -{count} to -1")
    unused = [layer.format(layer=number) for number in range(used, count)]
    return replace(tower.with_layers(used), ignored_prefixes=(*unused, *tower.ignored_prefixes))


def projector(config: ConfigFile, size: int, text_size: int, *, bias: bool) -> tuple[Step, ...]:
    """Return the MLP of two layers; `bias`: whether it has one by default."""
    bias, active = config.flag("multimodal_projector_bias", bias), activation(config, "projector_hidden_act", "gelu")
    return (
        Matrix.of(PROJECTOR + "linear_1", text_size, size, bias=bias, activation=active),
        Matrix.of(PROJECTOR + "linear_2", text_size, text_size, bias=bias),
    )
