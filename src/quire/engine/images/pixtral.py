"""Pixtral and Mistral 3: an image keeps its shape, and its rows of patches end with a token of their own.

32 × 48 pixels in patches of 16     [IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]
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

BICUBIC: Final = 3
MARKER, BREAK, END = "[IMG]", "[IMG_BREAK]", "[IMG_END]"


@dataclass(frozen=True, slots=True)
class PixtralLayout:
    """Implements `Layout`. `size`: the most pixels of the height and the width. `patch`: the pixels for one token."""

    size: tuple[int, int]
    patch: int
    filter: int
    marker: str = MARKER
    placeholder: str = MARKER
    tokens: tuple[str, ...] = (MARKER, BREAK, END)
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> PixtralLayout:
        """Return the layout of a model folder."""
        edge = settings.edge("size", "longest_edge", 1024) if not settings.has_key("size", "height") else 0
        merged = settings.integer("spatial_merge_size", settings.of_model("spatial_merge_size") or 1, most=16)
        patch = merged * settings.edge("patch_size", "height", settings.of_model("patch_size") or 16)
        height, width = (edge, edge) if edge else settings.pair("size", 1024)
        most = max(1, math.isqrt(settings.max_patches) // merged) * patch
        return cls(
            size=(min(height, most), min(width, most)),
            patch=patch,
            filter=settings.filter(BICUBIC),
        )

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        height, width = self._resized(height, width)
        row, count = (self.placeholder,) * (width // self.patch), height // self.patch
        return Plan(self.placeholder, (((*row, BREAK) * (count - 1)) + (*row, END),))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the image, resized to complete patches."""
        height, width = self._resized(image.height, image.width)
        return [image.resize((width, height), self.filter)]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        ratio = max(height / self.size[0], width / self.size[1])
        if ratio > 1:
            height, width = max(1, math.floor(height / ratio)), max(1, math.floor(width / ratio))
        return math.ceil(height / self.patch) * self.patch, math.ceil(width / self.patch) * self.patch
