"""GLM-4.1V, 4.5V and 4.6V: an image keeps its shape, within a number of pixels, with a token for each 2 × 2 patches.

Look: <|begin_of_image|><|image|><|end_of_image|>      56 × 84 pixels in patches of 14: six times <|image|>

The makers count pixels as of a video, of which an image is two frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.engine.images.qwen2_vl import BICUBIC, Qwen2VLLayout
from quire.engine.images.settings import ProcessorSettings

MARKER: Final = "<|image|>"
MIN_PIXELS, MAX_PIXELS = 112 * 112, 28 * 28 * 15_000
MOST_PIXELS: Final = 1 << 26
MOST_FRAMES: Final = 16


@dataclass(frozen=True, slots=True)
class Glm4VLayout(Qwen2VLLayout):
    """The layout of Qwen2-VL with other bounds, and with images enlarged that are smaller than a cell."""

    marker: str = MARKER
    placeholder: str = MARKER
    tokens: tuple[str, ...] = (MARKER,)

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

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if min(height, width) < self.cell:
            scale = max(self.cell / height, self.cell / width)
            height, width = int(height * scale), int(width * scale)
        return Qwen2VLLayout._resized(self, height, width)
