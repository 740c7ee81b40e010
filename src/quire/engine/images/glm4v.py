"""GLM-4.1V, 4.5V and 4.6V: an image keeps its shape, within a number of pixels, with a token for each 2 × 2 patches.

Look: <|begin_of_image|><|image|><|end_of_image|>      56 × 84 pixels in patches of 14: six times <|image|>

The makers count pixels as of a video, of which an image is two frames.
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
MARKER: Final = "<|image|>"
MIN_PIXELS, MAX_PIXELS = 112 * 112, 28 * 28 * 15_000
MOST_PIXELS: Final = 1 << 26
MOST_RATIO: Final = 200
MOST_FRAMES: Final = 16


@dataclass(frozen=True, slots=True)
class Glm4VLayout:
    """Implements `Layout`. `cell`: the pixels of an edge for one token. `bounds`: of the pixels of a frame."""

    bounds: tuple[float, float]
    cell: int
    filter: int
    marker: str = MARKER
    placeholder: str = MARKER
    tokens: tuple[str, ...] = (MARKER,)
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Glm4VLayout:
        """Return the layout of a model folder."""
        least = settings.edge("size", "shortest_edge", MIN_PIXELS, most=MOST_PIXELS)
        most = settings.edge("size", "longest_edge", MAX_PIXELS, most=MOST_PIXELS)
        patch = settings.integer("patch_size", settings.of_model("patch_size") or 14)
        merged = settings.integer("merge_size", settings.of_model("spatial_merge_size") or 2, most=16)
        frames = settings.integer("temporal_patch_size", 2, most=MOST_FRAMES)
        largest = min(most / frames, settings.max_patches * patch**2)  # makers allow more than an engine has memory for
        if least / frames > largest or (merged * patch) ** 2 > largest:
            raise settings.error("size.longest_edge", most, f"{max(least, frames * (merged * patch) ** 2)} or more")
        return cls((least / frames, largest), merged * patch, settings.filter(BICUBIC))

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens of an image of this size."""
        height, width = self._resized(height, width)
        return Plan(MARKER, ((MARKER,) * (height // self.cell * (width // self.cell)),))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the image, resized to complete patches."""
        height, width = self._resized(image.height, image.width)
        return [image.resize((width, height), self.filter)]

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if min(height, width) < self.cell:
            scale = max(self.cell / height, self.cell / width)
            height, width = int(height * scale), int(width * scale)
        if max(height, width) > MOST_RATIO * min(height, width):
            raise ValueError(f"an image at most {MOST_RATIO} times as long as wide")
        return within_pixels((height, width), self.cell, self.bounds)
