"""The image encoder of Qwen2.5-VL: that of Qwen2-VL with RMS norms and gated MLPs, and windows in most layers.

A window is a square of patches, smaller at the edges of an image. In most layers, a patch attends to those of its
window only.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import NormKind, NormSpec, Part
from quire.compute.models.sublayers import MLPSpec
from quire.compute.models.vision import qwen2_vl
from quire.compute.models.vision.common import activation
from quire.compute.models.vision.qwen2_vl import EPSILON, LAYER, MAX_MERGE, USUAL_MAX_PIXELS, VISUAL
from quire.compute.models.vision.spec import WINDOW_ROWS, VisionSpec

DEFAULTS: Final = MappingProxyType(
    {
        **{"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14},
        **{"spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112},
        **{"hidden_act": "silu", "fullatt_block_indexes": [7, 15, 23, 31]},
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
MAX_WINDOW: Final = 4096


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    vision = config.section("vision_config").over(DEFAULTS)
    merge, size = vision.size("spatial_merge_size", high=MAX_MERGE), vision.size("hidden_size")
    patches = qwen2_vl.moving_patches(vision, settings, VISUAL, merge, size, USUAL_MAX_PIXELS)
    window = vision.size("window_size", high=MAX_WINDOW) // merge // patches.size * merge
    if not window or window * merge % WINDOW_ROWS:
        raise vision.error("window_size", f"whole squares, a multiple of {WINDOW_ROWS} patches in each row of them")
    inner, norm = vision.size("intermediate_size"), NormSpec(NormKind.RMS, EPSILON)
    tower = replace(
        qwen2_vl.grid_tower(vision, patches, LAYER, STEMS, inner),
        norm=norm,
        mlp=MLPSpec(inner, activation(vision, "hidden_act", "silu"), bias=True),
    )
    whole = vision.indices("fullatt_block_indexes", len(tower.layers))
    return replace(
        qwen2_vl.with_merger(config, settings, text, replace(patches, window=window), tower),
        in_windows=tuple(layer for layer in range(len(tower.layers)) if layer not in whole),
    )
