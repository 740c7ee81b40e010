"""InternVL: an image is cut into square tiles, in the shape nearest to its own, and followed by a small copy of all.

one tile   <img>▯</img>
1 × 2      <img>▯▯▯</img>      ▯: 256 times <IMG_CONTEXT>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.decoding import MAX_PIXELS
from quire.engine.images.layout import Plan
from quire.engine.images.settings import ProcessorSettings
from quire.engine.images.sizes import grids_of, nearest_grid

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3
START, PLACEHOLDER, END = "<img>", "<IMG_CONTEXT>", "</img>"
MOST_TILES: Final = 64


@dataclass(frozen=True, slots=True)
class InternVLLayout:
    """Implements `Layout`. `tile`: height and width. `grids`: the allowed rows and columns of tiles."""

    tile: tuple[int, int]
    tile_tokens: int
    grids: tuple[tuple[int, int], ...]
    filter: int
    marker: str = PLACEHOLDER
    placeholder: str = PLACEHOLDER
    tokens: tuple[str, ...] = (START, PLACEHOLDER, END)
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> InternVLLayout:
        """Return the layout of a model folder.

        The makers' processor always cuts images, whatever `crop_to_patches` is in the settings of its images.
        """
        tile = settings.pair("size", 384)
        fewest = settings.integer("min_patches", 1, most=MOST_TILES)
        most = settings.integer("max_patches", 12, most=min(MOST_TILES, MAX_PIXELS // (tile[0] * tile[1])))
        if fewest > most:
            raise settings.error("min_patches", fewest, f"at most {most}, the max_patches")
        return cls(
            tile=tile,
            tile_tokens=settings.integer("image_seq_length", 256),
            grids=grids_of(fewest, most),
            filter=settings.filter(BICUBIC),
        )

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        rows, columns = self._grid(height, width)
        count = rows * columns + (rows * columns > 1)
        return Plan(f"{START}{PLACEHOLDER * count}{END}", ((PLACEHOLDER,) * self.tile_tokens,) * count)

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the tiles, row by row, and a copy of the whole; or the resized image alone."""
        (rows, columns), (height, width) = self._grid(image.height, image.width), self.tile
        whole = image.resize((width, height), self.filter)
        if rows == columns == 1:
            return [whole]
        image = image.resize((columns * width, rows * height), self.filter)
        boxes = ((column * width, row * height) for row in range(rows) for column in range(columns))
        return [*(image.crop((left, top, left + width, top + height)) for left, top in boxes), whole]

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        return nearest_grid((height, width), self.grids, self.tile[0] * self.tile[1])
