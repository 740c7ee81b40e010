"""The image encoder of InternVL: InternViT, whose sublayers have a factor for each number of their outputs.

Squares of patches become one row each, by a norm and an MLP. The makers' processor cuts an image into tiles, all of one
size. Each of them is an image for the encoder.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormScope, NormSpec, Part
from quire.compute.models.vision.common import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    Normalization,
    placeholder_of,
    square_patches,
    vision_transformer,
)
from quire.compute.models.vision.llava import PROJECTOR, projector, shortened
from quire.compute.models.vision.spec import Join, Norm, Patches, VisionSpec

TOWER: Final = "vision_tower."
EMBEDDINGS: Final = TOWER + "embeddings."
LAYER: Final = TOWER + "encoder.layer.{layer}."
DEFAULTS: Final = MappingProxyType(
    {
        **{"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
        **{"image_size": 448, "patch_size": 14},
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.ATTENTION_NORM: LAYER + "layernorm_before",
        Part.QUERY: LAYER + "attention.q_proj",
        Part.KEY: LAYER + "attention.k_proj",
        Part.VALUE: LAYER + "attention.v_proj",
        Part.OUTPUT: LAYER + "attention.projection_layer",
        Part.MLP_NORM: LAYER + "layernorm_after",
        Part.UP: LAYER + "mlp.fc1",
        Part.DOWN: LAYER + "mlp.fc2",
    }
)
FACTORS: Final = MappingProxyType({Part.OUTPUT: LAYER + "lambda_1", Part.DOWN: LAYER + "lambda_2"})
HEAD_NORMS: Final = MappingProxyType(
    {Part.QUERY_NORM: LAYER + "attention.q_norm", Part.KEY_NORM: LAYER + "attention.k_norm"}
)
HEAD_EPSILON: Final = 1e-6
PROJECTOR_EPSILON: Final = 1e-5
MAX_MERGE: Final = 16


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = _with_numbers(config.section("vision_config").over(DEFAULTS))
    vision.require("model_type", "internvl_vision", None)
    config.require("vision_feature_select_strategy", "default", None)
    merge = _merge(config)
    patches = _patches(vision, merge)
    tower = shortened(config, _tower(vision, patches), LAYER, usual=-1)
    joined = tower.hidden_size * merge**2
    pixels = Normalization.read(settings, CLIP_MEAN, CLIP_DEVIATION)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 151_667),
        patches=patches,
        tower=tower,
        connector=(
            Join(merge**2),
            Norm(PROJECTOR + "layer_norm", NormSpec(NormKind.LAYER, PROJECTOR_EPSILON), joined),
            *projector(config, joined, text.hidden_size, bias=True),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=(TOWER, PROJECTOR),
    )


def _with_numbers(vision: ConfigFile) -> ConfigFile:
    """Return settings in which lengths are numbers; folders have one for the height and one for the width."""
    fields = dict(vision.fields)
    for field in ("image_size", "patch_size"):
        value = fields[field]
        if isinstance(value, list):
            if len(value) != 2 or value[0] != value[1]:
                raise vision.error(field, "a number, or two that are equal")
            fields[field] = value[0]
    return ConfigFile(vision.where, fields)


def _merge(config: ConfigFile) -> int:
    """Return the patches per side of a square that becomes one row."""
    ratio = config.number("downsample_ratio", 0.5)
    merge = round(1 / ratio) if ratio * MAX_MERGE >= 1 else 0
    if merge < 1 or merge * ratio != 1:
        raise config.error("downsample_ratio", f"1 divided by an integer up to {MAX_MERGE}")
    return merge


def _patches(vision: ConfigFile, merge: int) -> Patches:
    if not vision.flag("use_absolute_position_embeddings", True):
        raise vision.error("use_absolute_position_embeddings", "true")
    patches = square_patches(vision, EMBEDDINGS, merge, first=EMBEDDINGS + "cls_token")
    stem = EMBEDDINGS + "patch_embeddings.projection"
    return replace(
        patches,
        matrix=replace(patches.matrix, weight=f"{stem}.weight", bias=f"{stem}.bias"),
        positions=EMBEDDINGS + "position_embeddings",
    )


def _tower(vision: ConfigFile, patches: Patches) -> DecoderSpec:
    if not vision.flag("use_mean_pooling", True):
        raise vision.error("use_mean_pooling", "true: no norm after the layers")
    vision.require("norm_type", "layer_norm", "rms_norm", None)
    tower = vision_transformer(vision, STEMS, 1e-6, patches, "gelu")
    is_rms = vision.fields.get("norm_type") == "rms_norm"
    has_norms = vision.flag("use_qk_norm", False)
    norms = {part: replace(tower.sources[Part.QUERY], stem=stem) for part, stem in HEAD_NORMS.items()}
    factors = {part: replace(tower.sources[part], factors=vector) for part, vector in FACTORS.items()}
    return replace(
        tower,
        norm=NormSpec(NormKind.RMS, tower.norm.epsilon) if is_rms else tower.norm,
        attention=replace(
            tower.attention,
            bias=vision.flag("attention_bias", False),
            qk_norm=NormSpec(NormKind.RMS, HEAD_EPSILON) if has_norms else None,
            qk_norm_scope=NormScope.ALL_HEADS,
        ),
        sources=MappingProxyType({**tower.sources, **factors, **(norms if has_norms else {})}),
        ignored_tensors=frozenset({EMBEDDINGS + "mask_token"}),
    )
