"""The image encoder of Qwen3-VL and Qwen3.5: that of Qwen2-VL with a table of positions, and more rows for the text.

In Qwen3-VL the states of some layers become rows too, each by an MLP of its own: the text model adds them to the
outputs of its first layers. Qwen3.5 has no such rows.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.qwen3_vl import deep_layers
from quire.compute.models.sublayers import Activation
from quire.compute.models.vision.common import HALF, Normalization, placeholder_of
from quire.compute.models.vision.qwen2_vl import EPSILON, MAX_MERGE, grid_tower, moving_patches
from quire.compute.models.vision.spec import MAX_PATCHES, Deep, Join, Matrix, Norm, Step, VisionSpec

VISUAL: Final = "model.visual."
LAYER: Final = VISUAL + "blocks.{layer}."
DEFAULTS: Final = MappingProxyType(
    {
        **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 2304},
        "hidden_act": "gelu_pytorch_tanh",
    }
)
STEMS: Final = MappingProxyType(
    {
        Part.ATTENTION_NORM: LAYER + "norm1",
        Part.OUTPUT: LAYER + "attn.proj",
        Part.MLP_NORM: LAYER + "norm2",
        Part.UP: LAYER + "mlp.linear_fc1",
        Part.DOWN: LAYER + "mlp.linear_fc2",
    }
)
USUAL_MAX_PIXELS: Final = 16_777_216


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    if not any(layer.rope is not None and layer.rope.axes for layer in text.layers):
        raise config.error("text_config", "sections of positions for time, height and width")
    merge = vision.size("spatial_merge_size", high=MAX_MERGE)
    num_positions = vision.size("num_position_embeddings", high=MAX_PATCHES)
    side = isqrt(num_positions)
    if side**2 != num_positions:
        raise vision.error("num_position_embeddings", "a square")
    patches = replace(
        moving_patches(vision, settings, VISUAL, merge, vision.size("hidden_size"), USUAL_MAX_PIXELS),
        positions=VISUAL + "pos_embed.weight",
        positions_side=side,
        positions_reach_edges=True,
    )
    patches = replace(patches, matrix=replace(patches.matrix, bias=VISUAL + "patch_embed.proj.bias"))
    tower = grid_tower(vision, patches, LAYER, STEMS, vision.size("intermediate_size"))
    size, joined = tower.hidden_size, tower.hidden_size * merge**2
    merger, deep = VISUAL + "merger.", deep_layers(vision) if text.deep_rows else ()
    if deep and deep[-1] >= len(tower.layers) - 1:
        raise vision.error("deepstack_visual_indexes", f"layers before the last one, {len(tower.layers) - 1}")
    pixels = Normalization.read(settings, HALF, HALF)
    return VisionSpec(
        placeholder=placeholder_of(config, text, 151_655),
        patches=patches,
        tower=tower,
        connector=(
            Norm(merger + "norm", NormSpec(NormKind.LAYER, EPSILON), size),
            Join(merge**2),
            *_mlp(merger, joined, text.hidden_size),
        ),
        rescale=pixels.rescale,
        mean=pixels.mean,
        deviation=pixels.deviation,
        prefixes=(VISUAL,),
        has_axes=True,
        deep=tuple(_deep(number, layer, merge, joined, text.hidden_size) for number, layer in enumerate(deep)),
    )


def _deep(number: int, layer: int, merge: int, joined: int, text_size: int) -> Deep:
    """Return the steps from the states of a layer to rows for the text model's layer of this number."""
    merger = f"{VISUAL}deepstack_merger_list.{number}."
    norm = Norm(merger + "norm", NormSpec(NormKind.LAYER, EPSILON), joined)
    return Deep(layer, (Join(merge**2), norm, *_mlp(merger, joined, text_size)))


def _mlp(stem: str, size: int, text_size: int) -> tuple[Step, ...]:
    return (
        Matrix.of(stem + "linear_fc1", size, size, bias=True, activation=Activation.GELU),
        Matrix.of(stem + "linear_fc2", text_size, size, bias=True),
    )
