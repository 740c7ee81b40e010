"""Decodes an image file from a stranger, within limits that hold before any pixel is decoded.

    bytes ──► the first bytes name the format ──► header: size, within MAX_PIXELS ──► pixels ──► upright ──► RGB

Only four formats are opened, each by its own decoder of Pillow: the other fifty are attack surface. A small file can
claim a huge image, and a JPEG can make the decoder visit each pixel thousands of times, so both are counted first. Of
an animation, only the first frame is decoded.

Colours are those of `transformers`: the orientation in EXIF is applied, and transparent pixels are blended with white.
The one exception is grey of 16 bits, which keeps its 8 highest bits; with `transformers` it becomes white.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Final

from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL import Image as pillow
    from PIL.ImageFile import ImageFile

MAX_PIXELS: Final = 1 << 25
"""The most pixels of an image: a photo of 33 megapixels. Decoding takes up to 8 bytes of memory for each."""

MAX_IMAGE_BYTES: Final = 32 << 20
MAX_SCANS: Final = 100
"""The most scans of a JPEG. Progressive ones have about ten; each can visit all pixels for a few bytes of file."""

START_OF_SCAN: Final = b"\xff\xda"
STRIP: Final = 256
"""Rows that are blended with white at once, to bound the memory."""

FORMATS: Final = "a PNG, JPEG, WebP or GIF image"


def opened(data: bytes, where: str) -> ImageFile:
    """Return an image whose header was read, and whose pixels were not; raises `InvalidRequestError` naming `where`."""
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequestError(where, f"{len(data):,} bytes", f"an image of at most {MAX_IMAGE_BYTES:,} bytes")
    try:
        image = _open(data)
    except Exception as error:  # a decoder raises anything for a broken header
        raise _broken(where, error) from error
    if image is None:
        raise InvalidRequestError(where, f"{len(data):,} bytes of another format", FORMATS)
    if min(image.size) < 1 or image.width * image.height > MAX_PIXELS:
        raise InvalidRequestError(where, f"{image.width} x {image.height} pixels", f"at most {MAX_PIXELS:,} pixels")
    if image.format == "JPEG" and data.count(START_OF_SCAN) > MAX_SCANS:
        raise InvalidRequestError(where, "a JPEG of very many scans", f"a JPEG of at most {MAX_SCANS} scans")
    return image


def decoded(image: pillow.Image, where: str) -> pillow.Image:
    """Return an upright image in RGB; raises `InvalidRequestError` naming `where` if the file is broken or cut off."""
    from PIL import ImageOps

    try:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        return in_rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # as above
        raise _broken(where, error) from error


def in_rgb(image: pillow.Image) -> pillow.Image:
    """Return an image in RGB, transparent pixels blended with white. Does not mutate."""
    from PIL import Image as pillow

    if image.mode.startswith("I;16"):
        return pillow.frombytes("L", image.size, image.tobytes("raw", "I;16B")[::2]).convert("RGB")
    if "A" not in image.getbands() and "transparency" not in image.info:
        return image.convert("RGB")
    result = pillow.new("RGB", image.size)
    for top in range(0, image.height, STRIP):
        strip = image.crop((0, top, image.width, min(top + STRIP, image.height))).convert("RGBA")
        white = pillow.new("RGBA", strip.size, (255, 255, 255, 255))
        result.paste(pillow.alpha_composite(white, strip).convert("RGB"), (0, top))
    return result


def _open(data: bytes) -> ImageFile | None:
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    file = io.BytesIO(data)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile(file)
    if data.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile(file)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile(file)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile(file)
    return None


def _broken(where: str, error: Exception) -> InvalidRequestError:
    found = " ".join(f"broken: {error or type(error).__name__}"[:200].split())
    return InvalidRequestError(where, found, f"{FORMATS} that is complete")
