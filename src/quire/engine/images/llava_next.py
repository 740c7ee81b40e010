"""LLaVA-NeXT (1.6): a small copy of the whole, then a larger image whose encoder cuts it into tiles.

The larger image has one of a few sizes, all multiples of a tile. The original is resized to fit into it, in its own
shape, with black edges.

Look: <image>      ──►   Look: ▯▯      ▯: <image> 576 times; then for each line of patches, and once more at its end

Lines of patches that only show edges get no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.layout import Plan
from quire.engine.images.settings import MAX_EDGE, MOST_PATCHES, ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3
CLIP_SIZE: Final = 224
MARKER: Final = "<image>"
PINPOINTS: Final = "image_grid_pinpoints"
USUAL: Final = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))
MOST_PINPOINTS: Final = 256
MOST_TILES: Final = 64
DECIMALS: Final = 7


@dataclass(frozen=True, slots=True)
class LlavaNextLayout:
    """Implements `Layout`. `tile`: the height and width of a tile. `sizes`: the heights and widths of larger images."""

    tile: int
    sizes: tuple[tuple[int, int], ...]
    patch: int
    filter: int
    marker: str = MARKER
    placeholder: str = MARKER
    tokens: tuple[str, ...] = (MARKER,)
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> LlavaNextLayout:
        """Return the layout of a model folder."""
        is_pair = settings.has_key("size", "height")
        tile = settings.pair("size", CLIP_SIZE) if is_pair else (settings.edge("size", "shortest_edge", CLIP_SIZE),) * 2
        crop = settings.pair("crop_size", CLIP_SIZE) if settings.flag("do_center_crop", True) else tile
        if crop != tile or tile[0] != tile[1]:
            raise settings.error("crop_size", list(crop), f"{tile[0]} x {tile[0]}, the size of a tile")
        patch = settings.integer("patch_size", settings.of_model("patch_size"), most=tile[0])
        if (tile[0] // patch) ** 2 > MOST_PATCHES:
            raise settings.error("patch_size", patch, f"a size for at most {MOST_PATCHES} patches in a tile")
        marker = settings.text("image_token", MARKER)
        return cls(
            tile=tile[0],
            sizes=_sizes(settings, tile[0]),
            patch=patch,
            filter=settings.filter(BICUBIC),
            marker=marker,
            placeholder=marker,
            tokens=(marker,),
        )

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        side = self.tile // self.patch
        lines, columns = self._left((height, width), side)
        whole, tiles = (self.placeholder,) * side**2, (self.placeholder,) * (lines * (columns + 1))
        return Plan(self.placeholder * 2, (whole, tiles)) if tiles else Plan(self.placeholder, (whole,))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the copy of the whole, and the larger image unless all its lines are left out."""
        from PIL import Image as pillow

        whole = image.resize((self.tile, self.tile), self.filter)
        if len(self.plan(image.height, image.width).tiles) == 1:
            return [whole]
        height, width = self._best(image.height, image.width)
        by_width, by_height = width / image.width, height / image.height
        if by_width < by_height:
            size = width, min(math.ceil(image.height * by_width), height)
        else:
            size = min(math.ceil(image.width * by_height), width), height
        larger = pillow.new("RGB", (width, height))
        larger.paste(image.resize(size, self.filter), ((width - size[0]) // 2, (height - size[1]) // 2))
        return [whole, larger]

    def _left(self, size: tuple[int, int], side: int) -> tuple[int, int]:
        """Return the lines and columns of patches that get tokens; `side`: the patches along an edge of a tile."""
        (height, width), best = size, self._best(*size)
        lines, columns = (edge // self.tile * side for edge in best)
        if width / height > columns / lines:
            shown = int(round(height * (columns / width), DECIMALS))
            return lines - (lines - shown) // 2 * 2, columns
        shown = int(round(width * (lines / height), DECIMALS))
        return lines, columns - (columns - shown) // 2 * 2

    def _best(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that shows most pixels of an image, and of several the one with the smallest edges."""
        found, most, least = self.sizes[0], 0, math.inf
        for rows, columns in self.sizes:
            scale = min(columns / width, rows / height)
            shown = min(int(width * scale) * int(height * scale), width * height)
            if shown > most or (shown == most and rows * columns - shown < least):
                found, most, least = (rows, columns), shown, rows * columns - shown
        return found


def _sizes(settings: ProcessorSettings, tile: int) -> tuple[tuple[int, int], ...]:
    """Return the allowed heights and widths of larger images; raises unless tiles fill them."""
    value = settings.fields.get(PINPOINTS)
    sizes = list(USUAL) if value is None else value
    allowed = f"up to {MOST_PINPOINTS} heights and widths of up to {MOST_TILES} tiles, multiples of {tile}"
    if not isinstance(sizes, list) or not 0 < len(sizes) <= MOST_PINPOINTS:
        raise settings.error(PINPOINTS, value, allowed)
    for size in sizes:
        edges = size if isinstance(size, list | tuple) else ()
        are_filled = all(type(edge) is int and 0 < edge <= MAX_EDGE and edge % tile == 0 for edge in edges)
        if len(edges) != 2 or not are_filled or math.prod(edges) > MOST_TILES * tile**2:
            raise settings.error(PINPOINTS, size, allowed)
    return tuple((height, width) for height, width in sizes)
