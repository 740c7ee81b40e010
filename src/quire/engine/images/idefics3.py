r"""Idefics3 and SmolVLM: an image is cut into square tiles, and followed by a small copy of the whole.

    1 × 2 tiles     <fake><row_1_col_1>▯<fake><row_1_col_2>▯ \n \n <fake><global-img>▯<fake>       ▯: 64 or 169 tokens
    one tile        <fake><global-img>▯<fake>

The image is first resized so that its longer edge has a fixed length, then so that tiles fill it: small images become
as many tiles as large ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.layout import Plan
from quire.engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

AROUND: Final = "<fake_token_around_image>"
WHOLE: Final = "<global-img>"
LANCZOS: Final = 1
MIN_TILE: Final = 32
"""The smallest edge of a tile; published models have 364 and 512. It bounds the number of tiles."""


@dataclass(frozen=True, slots=True)
class Idefics3Layout:
    """Implements `Layout`."""

    longest_edge: int
    tile: int
    tile_tokens: int
    filter: int
    splits: bool
    marker: str = "<image>"
    placeholder: str = "<image>"
    tokens: tuple[str, ...] = (AROUND, "<image>")
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Idefics3Layout:
        """Return the layout of a model folder."""
        tile = settings.edge("max_image_size", "longest_edge", 364)
        if tile < MIN_TILE:
            raise settings.error("max_image_size", tile, f"{MIN_TILE} pixels or more")
        return cls(
            longest_edge=settings.edge("size", "longest_edge", 4 * 364),
            tile=tile,
            tile_tokens=settings.integer("image_seq_len", 169),
            filter=settings.filter(LANCZOS),
            splits=settings.flag("do_image_splitting", True),
        )

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        rows, columns = self._grid(height, width)
        whole = f"{AROUND}{WHOLE}{self.placeholder}{AROUND}"
        if rows == columns == 0:
            return Plan(whole, self._tokens(1))
        lines = (
            "".join(f"{AROUND}<row_{row}_col_{column}>{self.placeholder}" for column in range(1, columns + 1))
            for row in range(1, rows + 1)
        )
        return Plan("\n".join(lines) + f"\n\n{whole}", self._tokens(rows * columns + 1))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the tiles of an image, row by row, and a copy of the whole."""
        rows, columns = self._grid(image.height, image.width)
        height, width = self._first_size(image.height, image.width)
        image = image.resize((width, height), self.filter)
        if self.splits:
            height, width = self._filled_size(height, width)
            image = image.resize((width, height), self.filter)
        size = self.tile
        boxes = ((column * size, row * size) for row in range(rows) for column in range(columns))
        tiles = [image.crop((left, top, left + size, top + size)) for left, top in boxes]
        return [*tiles, image.resize((size, size), self.filter)]

    def _tokens(self, num_tiles: int) -> tuple[tuple[str, ...], ...]:
        return ((self.placeholder,) * self.tile_tokens,) * num_tiles

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles, without the copy of the whole; 0 and 0 if that is all."""
        if not self.splits:
            return 0, 0
        height, width = self._filled_size(*self._first_size(height, width))
        rows, columns = height // self.tile, width // self.tile
        return (0, 0) if rows == columns == 1 else (rows, columns)

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size with the longer edge as set, and an even shorter one."""
        ratio = width / height
        if width >= height:
            width = self.longest_edge
            height = int(width / ratio)
            height += height % 2
        else:
            height = self.longest_edge
            width = int(height * ratio)
            width += width % 2
        return max(height, 1), max(width, 1)

    def _filled_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size whose edges are multiples of a tile."""
        ratio = width / height
        if width >= height:
            width = self._up(width)
            return self._up(int(width / ratio)), width
        height = self._up(height)
        return height, self._up(int(height * ratio))

    def _up(self, length: int) -> int:
        return math.ceil(length / self.tile) * self.tile
