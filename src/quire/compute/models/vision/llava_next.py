"""The image encoder of LLaVA-NeXT (1.6): that of LLaVA 1.5, which encodes tiles of an image one by one.

A prompt has the rows of a small copy of the whole, then those of all tiles line by line, with a vector at each line's
end. The tiles show an image in its own shape with black edges; lines of the edges are left out.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.llava_next import NEWLINE
from quire.compute.models.vision import llava
from quire.compute.models.vision.spec import Tiled, VisionSpec

PINPOINTS: Final = "image_grid_pinpoints"
USUAL: Final = MappingProxyType({PINPOINTS: [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]})
MAX_PINPOINTS: Final = 256
MAX_TILES: Final = 64


def vision_spec(config: ConfigFile, settings: ConfigFile, text: DecoderSpec) -> VisionSpec:
    """Return the spec of the encoder; refuses settings that quire does not interpret."""
    spec = llava.vision_spec(config, settings, text)
    if spec.patches.image_size is None:
        raise config.section("vision_config").error("model_type", f"{llava.CLIP!r} or {llava.SIGLIP!r}")
    if not config.flag("use_image_newline_parameter", True):
        raise config.error("use_image_newline_parameter", "true")
    grids = _grids(config.over(USUAL), spec.patches.image_size)
    return replace(spec, tiled=Tiled(grids, NEWLINE), prefixes=(*spec.prefixes, NEWLINE))


def _grids(config: ConfigFile, tile: int) -> tuple[tuple[int, int], ...]:
    """Return the rows and columns of tiles in images of the allowed heights and widths."""
    sizes = config.fields[PINPOINTS]
    if not isinstance(sizes, list) or not 0 < len(sizes) <= MAX_PINPOINTS or not all(map(_is_size, sizes)):
        raise config.error(PINPOINTS, f"a list of up to {MAX_PINPOINTS} pairs of height and width")
    for height, width in sizes:
        if height % tile or width % tile or height // tile * (width // tile) > MAX_TILES:
            raise config.error(PINPOINTS, f"multiples of {tile}, the size of a tile, for up to {MAX_TILES} tiles")
    return tuple((height // tile, width // tile) for height, width in sizes)


def _is_size(size: object) -> bool:
    return isinstance(size, list) and len(size) == 2 and all(type(edge) is int and edge > 0 for edge in size)
