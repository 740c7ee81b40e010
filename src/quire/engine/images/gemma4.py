r"""Gemma 4: an image keeps its shape, and is made as large as its number of tokens allows.

Look: <|image|>     ──►   Look: <|image>▯<image|>       ▯: <|image|> for 48 × 48 pixels, up to 280 times
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.decoding import MAX_PIXELS
from quire.engine.images.layout import Plan
from quire.engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3
START, PLACEHOLDER, END = "<|image>", "<|image|>", "<image|>"
MOST_MERGED: Final = 16
UNIFIED: Final = "Gemma4UnifiedImageProcessor"
"""Of the 12B, whose patches are as large as the pixels of a token."""

ATTENTION: Final = "use_bidirectional_attention"


@dataclass(frozen=True, slots=True)
class Gemma4Layout:
    """Implements `Layout`. `cell`: the pixels of an edge for one token."""

    num_tokens: int
    patch: int
    merged: int
    filter: int
    is_whole: bool
    marker: str = PLACEHOLDER
    placeholder: str = PLACEHOLDER
    tokens: tuple[str, ...] = (START, PLACEHOLDER, END)

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Gemma4Layout:
        """Return the layout of a model folder."""
        if not settings.flag("do_resize", True):
            raise settings.error("do_resize", False, "true: the model takes no other sizes")
        merged = settings.integer("pooling_kernel_size", 3, most=MOST_MERGED)
        patches_a_token = 1 if settings.kind() == UNIFIED else merged**2
        layout = cls(
            num_tokens=min(settings.integer("max_soft_tokens", 280), settings.max_patches // patches_a_token),
            patch=settings.integer("patch_size", 16),
            merged=merged,
            filter=settings.filter(BICUBIC),
            is_whole=settings.of_text_model(ATTENTION) == "vision",
        )
        if layout.num_tokens * layout.cell**2 > MAX_PIXELS:  # any image is made as large as that
            raise settings.error("patch_size", layout.patch, f"images of at most {MAX_PIXELS:,} pixels")
        return layout

    @property
    def cell(self) -> int:
        """The pixels of an edge for one token."""
        return self.patch * self.merged

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        height, width = self._resized(height, width)
        count = height // self.cell * (width // self.cell)
        return Plan(f"{START}{PLACEHOLDER}{END}", ((PLACEHOLDER,) * count,))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the image in the size that the model takes."""
        height, width = self._resized(image.height, image.width)
        return [image if image.size == (width, height) else image.resize((width, height), self.filter)]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the largest size of whole cells in about the same shape; a very long image is one cell wide."""
        factor = math.sqrt(self.num_tokens * self.merged**2 * self.patch**2 / (height * width))
        rows, columns = (math.floor(factor * edge / self.cell) for edge in (height, width))
        if rows == 0:
            rows, columns = 1, min(width // height, self.num_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.num_tokens), 1
        return rows * self.cell, columns * self.cell
