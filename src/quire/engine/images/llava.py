"""LLaVA 1.5: an image is resized and cut to one square, or padded to a square, for CLIP or SigLIP.

Look: <image>      ──►   Look: ▯        ▯: a token for each patch of the square, 576 for 336 pixels
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.decoding import MAX_PIXELS
from quire.engine.images.layout import Plan
from quire.engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

BICUBIC: Final = 3
CLIP_SIZE: Final = 224
CLIP_MEAN: Final = (0.48145466, 0.4578275, 0.40821073)
PADS: Final = "LlavaImageProcessor"
MARKER: Final = "<image>"
MAX_PADDED: Final = 2 * MAX_PIXELS
"""The most pixels of the square that an image is padded to: it can have any number of times the pixels of the image."""


@dataclass(frozen=True, slots=True)
class LlavaLayout:
    """Implements `Layout`. `shortest_edge`: 0: the image is resized to `size`, height and width, and loses its shape.

    `crop`: height and width to cut from the middle; None: nothing is cut. `background`: the colour to pad with.
    """

    shortest_edge: int
    size: tuple[int, int]
    crop: tuple[int, int] | None
    background: tuple[int, ...] | None
    patch: int
    filter: int
    marker: str = MARKER
    placeholder: str = MARKER
    tokens: tuple[str, ...] = (MARKER,)
    is_whole: bool = False

    @classmethod
    def read(cls, settings: ProcessorSettings) -> LlavaLayout:
        """Return the layout of a model folder."""
        is_squeezed = settings.has_key("size", "height") or settings.kind().startswith("Siglip")
        crops = settings.flag("do_center_crop", not settings.kind().startswith("Siglip"))
        pads = settings.kind() == PADS and settings.flag("do_pad", False)
        mean, marker = settings.colours("image_mean", CLIP_MEAN), settings.text("image_token", MARKER)
        made = cls(
            shortest_edge=0 if is_squeezed else settings.edge("size", "shortest_edge", CLIP_SIZE),
            size=settings.pair("size", CLIP_SIZE) if is_squeezed else (0, 0),
            crop=settings.pair("crop_size", CLIP_SIZE) if crops else None,
            background=tuple(int(colour * 255) for colour in mean) if pads else None,
            patch=settings.integer("patch_size", settings.of_model("patch_size")),
            filter=settings.filter(BICUBIC),
            marker=marker,
            placeholder=marker,
            tokens=(marker,),
        )
        if made.crop is None and not (is_squeezed or pads):
            raise settings.error("do_center_crop", False, "true, because the shorter edge alone has a size")
        return made

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens, the same for every size that can be resized within the limit of pixels."""
        resized_height, resized_width = self._resized(height, width)
        padded = 0 if self.background is None else max(height, width) ** 2
        if resized_height * resized_width > MAX_PIXELS or padded > MAX_PADDED:
            raise ValueError("an image whose edges differ less")
        rows, columns = (length // self.patch for length in self.crop or (resized_height, resized_width))
        return Plan(self.placeholder, ((self.placeholder,) * (rows * columns),))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the square."""
        height, width = self._resized(image.height, image.width)
        image = self._padded(image).resize((width, height), self.filter)
        if self.crop is None:
            return [image]
        rows, columns = self.crop
        top, left = (height - rows) // 2, (width - columns) // 2
        return [image.crop((left, top, left + columns, top + rows))]  # black beyond the edges

    def _padded(self, image: Image) -> Image:
        if self.background is None or image.height == image.width:
            return image
        from PIL import Image as pillow

        edge = max(image.size)
        square = pillow.new("RGB", (edge, edge), self.background)
        square.paste(image, ((edge - image.width) // 2, (edge - image.height) // 2))
        return square

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        if not self.shortest_edge:
            return self.size
        if self.background is not None:
            return self.shortest_edge, self.shortest_edge
        longest_edge = int(self.shortest_edge * max(height, width) / min(height, width))
        return (longest_edge, self.shortest_edge) if width <= height else (self.shortest_edge, longest_edge)
