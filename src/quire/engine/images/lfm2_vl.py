"""LFM2-VL: a small image keeps its shape; a large one is cut into tiles, and followed by a small copy of the whole.

    small      <|image_start|>▯<|image_end|>                                                   ▯: 64 to 256 tokens
    1 × 2      <|image_start|><|img_row_1_col_1|>▯<|img_row_1_col_2|>▯<|img_thumbnail|>▯<|image_end|>

`transformers` resizes these images with torchvision, not with Pillow: its levels of a colour can differ by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.layout import Plan
from quire.engine.images.settings import ProcessorSettings
from quire.engine.images.sizes import grids_of, nearest_grid, within_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR: Final = 2
MARKER, START, END, WHOLE = "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"
MOST_TILES: Final = 64


@dataclass(frozen=True, slots=True)
class Lfm2VLLayout:
    """Implements `Layout`. A token has a `cell` of pixels. `pixels`: the fewest and most of an image without tiles.

    An image of up to `tolerance` times the most pixels is not cut. `grids`: the allowed rows and columns of tiles.
    """

    patch: int
    cell: int
    pixels: tuple[int, int]
    tolerance: float
    tile: int
    grids: tuple[tuple[int, int], ...]
    adds_whole: bool
    filter: int
    marker: str = MARKER
    placeholder: str = MARKER
    tokens: tuple[str, ...] = (MARKER, START, END, WHOLE)
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Lfm2VLLayout:
        """Return the layout of a model folder."""
        patch, merged = settings.integer("encoder_patch_size", 16), settings.integer("downsample_factor", 2, most=16)
        cell = patch * merged
        least, most = settings.integer("min_image_tokens", 64), settings.integer("max_image_tokens", 256)
        tile = settings.integer("tile_size", 512)
        fewest, many = settings.integer("min_tiles", 2), settings.integer("max_tiles", 10, most=MOST_TILES)
        if least > most or tile % cell or fewest > many:
            allowed = f"bounds in order, and a tile_size that {cell} divides"
            raise settings.error("min_image_tokens", (least, most, tile, fewest, many), allowed)
        splits = settings.flag("do_image_splitting", True) and many > 1
        return cls(
            patch=patch,
            cell=cell,
            pixels=(least * cell**2, most * cell**2),
            tolerance=settings.number("max_pixels_tolerance", 2.0),
            tile=tile,
            grids=grids_of(fewest, many) if splits else (),
            adds_whole=settings.flag("use_thumbnail", True),
            filter=settings.filter(BILINEAR),
        )

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        whole = within_pixels((height, width), self.cell, self.pixels, fewest=1)
        rows, columns = self._grid(height, width)
        if rows == columns == 1:
            return Plan(f"{START}{MARKER}{END}", (self._tokens(*whole),))
        places = [f"<|img_row_{row}_col_{column}|>" for row in range(1, rows + 1) for column in range(1, columns + 1)]
        places += [WHOLE] if self.adds_whole else []
        text = f"{START}{''.join(place + MARKER for place in places)}{END}"
        tiles = (self._tokens(self.tile, self.tile),) * (rows * columns)
        return Plan(text, (*tiles, self._tokens(*whole)) if self.adds_whole else tiles)

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the tiles, row by row, and a copy of the whole; or the resized image alone."""
        height, width = within_pixels((image.height, image.width), self.cell, self.pixels, fewest=1)
        whole, size = image.resize((width, height), self.filter), self.tile
        rows, columns = self._grid(image.height, image.width)
        if rows == columns == 1:
            return [whole]
        image = image.resize((columns * size, rows * size), self.filter)
        boxes = ((column * size, row * size) for row in range(rows) for column in range(columns))
        tiles = [image.crop((left, top, left + size, top + size)) for left, top in boxes]
        return [*tiles, whole] if self.adds_whole else tiles

    def _tokens(self, height: int, width: int) -> tuple[str, ...]:
        return (MARKER,) * (height // self.cell * (width // self.cell))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles, whose shape is the nearest to the image's; 1 and 1: no tiles."""
        cells = [max(self.patch / self.cell, round(edge / self.cell)) for edge in (height, width)]
        if not self.grids or cells[0] * cells[1] * self.cell**2 <= self.pixels[1] * self.tolerance:
            return 1, 1
        return nearest_grid((height, width), self.grids, self.tile**2)
