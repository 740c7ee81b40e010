"""The image encoder of GLM-4.1V, 4.5V and 4.6V: a tower whose positions rotate by row and column, with gated MLPs.

Each patch also has a row of a table of positions, which is resized by cubic convolution. A square of patches becomes
one row by a matrix, then by an MLP with a norm.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part, WeightSource
from quire.compute.models.sublayers import Activation, MLPSpec
from quire.compute.models.vision.common import (
    CLIP_DEVIATION,
    CLIP_MEAN,
    Normalization,
    activation,
    placeholder_of,
)
from quire.compute.models.vision.qwen2_vl import MAX_MERGE, grid_tower, moving_patches
from quire.compute.models.vision.spec import MAX_PATCHES, Gated, Join, Matrix, Norm, Patches, Step, VisionSpec

VISUAL: Final = "model.visual."
LAYER: Final = VISUAL + "blocks.{layer}."
DEFAULTS: Final = MappingProxyType(
    {
        **{"depth": 24, "hidden_size": 1536, "num_heads": 12, "out_hidden_size": 4096, "intermediate_size": 13_696},
        **{"image_size": 336, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-5},
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.ATTENTION_NORM: LAYER + "norm1",
        Part.OUTPUT: LAYER + "attn.proj",
        Part.MLP_NORM: LAYER + "norm2",
        Part.GATE: LAYER + "mlp.gate_proj",
        Part.UP: LAYER + "mlp.up_proj",
        Part.DOWN: LAYER + "mlp.down_proj",
    }
)
USUAL_MAX_PIXELS: Final = 28 * 28 * 15_000
LAYER_EPSILON: Final = 1e-5


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    vision.require("model_type", "glm4v_vision", "glm4v_moe_vision", None)
    if not any(layer.rope is not None and layer.rope.axes for layer in text.layers):
        raise config.error("text_config", "sections of positions for time, height and width")
    vision.section("rope_parameters").require("rope_type", "axial", "default", None)
    norm = NormSpec(NormKind.RMS, vision.number("rms_norm_eps"))
    patches = _patches(vision, settings, norm)
    pixels = Normalization.read(settings, CLIP_MEAN, CLIP_DEVIATION)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 151_343),
        patches=patches,
        tower=_tower(vision, patches, norm),
        connector=_connector(vision, patches, text.hidden_size),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=(VISUAL,),
        has_axes=True,
    )


def _patches(vision: ConfigFile, settings: ConfigFile, norm: NormSpec) -> Patches:
    """Return the patches; the makers' limit of pixels counts each of the two frames of an image."""
    size, merge = vision.size("hidden_size"), vision.size("spatial_merge_size", high=MAX_MERGE)
    patches = moving_patches(vision, settings, VISUAL, merge, size, USUAL_MAX_PIXELS)
    side = vision.size("image_size", high=patches.size * MAX_PATCHES) // patches.size
    if not 0 < side**2 <= MAX_PATCHES:
        raise vision.error("image_size", f"at most {MAX_PATCHES} patches of {patches.size} pixels")
    return replace(
        patches,
        matrix=replace(patches.matrix, bias=VISUAL + "patch_embed.proj.bias"),
        norm_after=Norm(VISUAL + "post_conv_layernorm", norm, size),
        positions=VISUAL + "embeddings.position_embedding.weight",
        positions_side=side,
        positions_cubic=True,
    )


def _tower(vision: ConfigFile, patches: Patches, norm: NormSpec) -> DecoderSpec:
    inner, bias = vision.size("out_hidden_size"), vision.flag("attention_bias", False)
    tower = grid_tower(vision, patches, LAYER, STEMS, inner)
    return replace(
        tower,
        norm=norm,
        attention=replace(tower.attention, bias=bias, output_bias=False),
        mlp=MLPSpec(inner, activation(vision, "hidden_act", "silu")),
        sources=MappingProxyType({**tower.sources, Part.FINAL_NORM: WeightSource(VISUAL + "post_layernorm")}),
        final_norm=True,
    )


def _connector(vision: ConfigFile, patches: Patches, text_size: int) -> tuple[Step, ...]:
    size, merge, inner = patches.matrix.num_outputs, patches.merge, vision.size("intermediate_size")
    stem, active = VISUAL + "merger.", activation(vision, "hidden_act", "silu")
    joined = Matrix(VISUAL + "downsample.weight", (text_size, size, merge, merge), VISUAL + "downsample.bias")
    if vision.size("out_hidden_size") != text_size:
        raise vision.error("out_hidden_size", f"{text_size}, the numbers of a row of the text model")
    norm = Norm(
        stem + "post_projection_norm", NormSpec(NormKind.LAYER, LAYER_EPSILON), text_size, activation=Activation.GELU
    )
    return (
        Join(merge**2, by_number=True),
        joined,
        Matrix.of(stem + "proj", text_size, text_size, bias=False),
        norm,
        Gated(
            Matrix.of(stem + "gate_proj", inner, text_size, bias=False, activation=active),
            Matrix.of(stem + "up_proj", inner, text_size, bias=False),
        ),
        Matrix.of(stem + "down_proj", text_size, inner, bias=False),
    )
