"""Qwen2-VL, 2.5 and 3: an image keeps its shape, within a number of pixels, and has a token for each 2 × 2 patches.

Look: <|vision_start|><|image_pad|><|vision_end|>      56 × 84 pixels in patches of 14: six times <|image_pad|>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.layout import Plan
from quire.engine.images.settings import ProcessorSettings
from quire.engine.images.sizes import within_pixels

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3
MARKER: Final = "<|image_pad|>"
MIN_PIXELS, MAX_PIXELS = 56 * 56, 28 * 28 * 1280
MOST_PIXELS: Final = 1 << 25
MOST_RATIO: Final = 200


@dataclass(frozen=True, slots=True)
class Qwen2VLLayout:
    """Implements `Layout`. `bounds`: of the pixels of an image. `cell`: the pixels of an edge for one token."""

    bounds: tuple[float, float]
    cell: int
    filter: int
    marker: str = MARKER
    placeholder: str = MARKER
    tokens: tuple[str, ...] = (MARKER,)
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Qwen2VLLayout:
        """Return the layout of a model folder."""
        least = settings.edge("size", "shortest_edge", MIN_PIXELS, most=MOST_PIXELS)
        least = settings.integer("min_pixels", least, most=MOST_PIXELS)
        most = settings.edge("size", "longest_edge", MAX_PIXELS, most=MOST_PIXELS)
        most = settings.integer("max_pixels", most, most=MOST_PIXELS)
        patch = settings.integer("patch_size", settings.of_model("patch_size") or 14)
        merged = settings.integer("merge_size", settings.of_model("spatial_merge_size") or 2, most=16)
        most = min(most, settings.max_patches * patch**2)  # makers allow more than an engine has memory for
        if least > most or (merged * patch) ** 2 > most:
            raise settings.error("max_pixels", most, f"{max(least, (merged * patch) ** 2)} or more")
        return cls((least, most), merged * patch, settings.filter(BICUBIC))

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        height, width = self._resized(height, width)
        return Plan(self.marker, ((self.marker,) * (height // self.cell * (width // self.cell)),))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the image, resized to complete patches."""
        height, width = self._resized(image.height, image.width)
        return [image.resize((width, height), self.filter)]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if max(height, width) > MOST_RATIO * min(height, width):
            raise ValueError(f"an image at most {MOST_RATIO} times as long as wide")
        return within_pixels((height, width), self.cell, self.bounds)
