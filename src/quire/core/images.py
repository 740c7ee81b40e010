"""Image: one image of a prompt, as an engine takes it, and the names of the tokens that stand for it.

    bytes ─► decoded and resized ─► Image ─► the model's image encoder ─► one row for each placeholder in the prompt

In the prompt an image is a span of tokens. Those that are the model's *placeholder* take the rows of the encoder one
after another; the others (the ends of rows, for some models) are embedded like any token.

All images have the same placeholders, so tokens do not tell which image they stand for. The cache therefore knows
tokens by **names**: the name of a token is the token itself, except in a block in which an image begins or goes on:

    block             [ 11 12  P  P ]   [ P  P  P 13 ]   [ 14 15 16 17 ]         P: placeholders of one image
    names             [ −a −b −c −d ]   [−e −f −g 13 ]   [ 14 15 16 17 ]

There, the tokens up to the last one of an image have names made of a hash over these tokens and the digests of the
images. A prefix can be shared up to the block before the image, and through it by requests with the same image.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from quire.core.errors import InvariantError
from quire.core.wire import WireReader, WireWriter

CHANNELS: Final = 3
MIN_IMAGE_TOKENS: Final = 4
"""An image has at least this many tokens: then the names of the first block with it have at least 124 bits."""

LOWEST: Final = -(1 << 31)


@dataclass(frozen=True, slots=True)
class Image:
    """An image whose first token is at position `start` of its prompt.

    `pixels`: red, green and blue of each pixel, row by row; empty in a log. `digest` identifies them, with all sizes.
    `is_whole`: its tokens attend to one another, so that one step computes all of them.
    """

    start: int
    num_tokens: int
    height: int
    width: int
    pixels: bytes = field(repr=False, compare=False)
    digest: bytes
    is_whole: bool = False

    @classmethod
    def of(
        cls, start: int, num_tokens: int, height: int, width: int, pixels: bytes, *, is_whole: bool = False
    ) -> Image:
        """Return the image with its digest.

        >>> image = Image.of(start=5, num_tokens=4, height=1, width=2, pixels=bytes(6))
        >>> image.end, image.digest == Image.of(0, 4, 2, 1, bytes(6)).digest
        (9, False)
        """
        if len(pixels) != height * width * CHANNELS:
            raise InvariantError(f"an image of {height} × {width} pixels has {len(pixels)} bytes")
        state = hashlib.blake2b(f"{height} {width} {num_tokens} ".encode(), digest_size=32)
        state.update(pixels)
        return cls(start, num_tokens, height, width, pixels, state.digest(), is_whole)

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.start + self.num_tokens

    def moved_to(self, start: int) -> Image:
        """Return the same image at another position of a prompt. Does not mutate."""
        return replace(self, start=start)

    def without_pixels(self) -> Image:
        """Return the image as a log keeps it. Does not mutate."""
        return replace(self, pixels=b"")


def write_image(writer: WireWriter, image: Image) -> None:
    """Write the binary form of an image without its pixels. Mutates the writer."""
    writer.column(array("i", [image.start, image.num_tokens, image.height, image.width, image.is_whole]))
    writer.raw(image.digest)


def read_image(reader: WireReader) -> Image:
    """Read the binary form of an image; raises `StepLogError` if it is torn."""
    start, num_tokens, height, width, is_whole = reader.column(5)
    return Image(start, num_tokens, height, width, b"", reader.raw(), bool(is_whole))


def names_of(tokens: array[int], images: Sequence[Image], block_size: int) -> array[int]:
    """Return the names of a prompt's tokens; `images` are in the order of their positions. Does not mutate.

    >>> names = names_of(array("i", [11, 12, 7, 7, 7, 7, 13]), [Image.of(2, 4, 1, 1, bytes(3))], block_size=4)
    >>> [name < 0 for name in names], names[6]
    ([True, True, True, True, True, True, False], 13)
    """
    names = tokens[:]
    inside: dict[int, list[Image]] = {}  # the images of each block
    for image in images:
        for block in range(image.start // block_size, -(-image.end // block_size)):
            inside.setdefault(block, []).append(image)
    for block, among in inside.items():
        first = block * block_size
        end = min(first + block_size, among[-1].end)
        names[first:end] = _hashed(tokens[first:end], [(each.start - first, each.digest) for each in among])
    return names


def _hashed(tokens: array[int], images: Sequence[tuple[int, bytes]]) -> array[int]:
    """Return a name below 0, which no token has, for each of the tokens."""
    state = hashlib.shake_256(tokens.tobytes())
    for offset, digest in images:
        state.update(offset.to_bytes(8, "little", signed=True) + digest)
    names = array("i")
    names.frombytes(state.digest(len(tokens) * names.itemsize))
    return array("i", [name | LOWEST for name in names])
