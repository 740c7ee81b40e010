r"""Gemma 3: every image becomes one square, and a fixed number of tokens that attend to one another.

Look: <start_of_image>     ──►   Look: \n\n<start_of_image>▯<end_of_image>\n\n       ▯: 256 tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quire.engine.images.layout import Plan
from quire.engine.images.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR: Final = 2
START, PLACEHOLDER, END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


@dataclass(frozen=True, slots=True)
class Gemma3Layout:
    """Implements `Layout`. `size`: the height and width of the square."""

    size: tuple[int, int]
    num_tokens: int
    filter: int
    marker: str = START
    placeholder: str = PLACEHOLDER
    tokens: tuple[str, ...] = (START, PLACEHOLDER, END)
    is_whole: bool = True

    @classmethod
    def read(cls, settings: ProcessorSettings) -> Gemma3Layout:
        """Return the layout of a model folder; refuses the mode that adds enlarged parts of an image."""
        if settings.flag("do_pan_and_scan", False):
            raise settings.error("do_pan_and_scan", True, "false: quire reads each image once")
        token = settings.text("image_token", PLACEHOLDER)
        return cls(
            size=settings.pair("size", 224),
            num_tokens=settings.integer("image_seq_length", 256),
            filter=settings.filter(BILINEAR),
            placeholder=token,
            tokens=(START, token, END),
        )

    def plan(self, height: int, width: int) -> Plan:
        """Return the text and tokens, the same for every size."""
        text = f"\n\n{START}{self.placeholder}{END}\n\n"
        return Plan(text, ((self.placeholder,) * self.num_tokens,))

    def tiles(self, image: Image) -> Sequence[Image]:
        """Return the square."""
        height, width = self.size
        return [image.resize((width, height), self.filter)]
