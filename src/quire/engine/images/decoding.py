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
import re
from itertools import islice
from typing import TYPE_CHECKING, Final

from quire.core.errors import InvalidRequestError

if TYPE_CHECKING:
    from PIL import Image as pillow
    from PIL.ImageFile import ImageFile

MAX_PIXELS: Final = 1 << 25
"""The most pixels of an image: a photo of 33 megapixels. Decoding takes 8 to 20 bytes of memory for each."""

MAX_EDGE: Final = (1 << 16) - 1
"""The most pixels of an edge, as in JPEG. To resize an image, Pillow takes 48 bytes for each pixel of an edge."""

MAX_IMAGE_BYTES: Final = 32 << 20
MAX_SCANS: Final = 64
"""The most scans of a JPEG. Progressive ones have about ten; each can visit all pixels for a few bytes of file."""

MAX_PARTS: Final = 1000
BYTES_PER_PART: Final = 1024
"""A file may have a part, such as a chunk of a PNG, for each of these bytes, and `MAX_PARTS` more: Pillow handles each
part in Python, and a part can have a single byte."""

PNG: Final = b"\x89PNG\r\n\x1a\n"
JPEG: Final = b"\xff\xd8\xff"
SEGMENTS: Final = frozenset({*range(0xC0, 0xD0), *range(0xDB, 0xF0), 0xFE}) - {0xC8}
"""The markers of a JPEG whose content Pillow reads or skips at once."""

START_OF_SCAN: Final = b"\xff\xda"
SCAN: Final = re.compile(START_OF_SCAN + rb"\0[\x06-\x0e][\0-\4]")
"""The head of a scan, with its length and components: what phones append to a photo, such as a video, has none."""

PROFILE: Final = b"iCCP"
MAX_PROFILES: Final = 8
"""The most colour profiles of a PNG, which has one: Pillow unpacks each, and a KiB of file can be a MiB of profile."""

STRIP: Final = 256
"""Rows that are blended with white at once, to bound the memory."""

FORMATS: Final = "a PNG, JPEG, WebP or GIF image"


def opened(data: bytes, where: str) -> ImageFile:
    """Return an image whose header was read, and whose pixels were not; raises `InvalidRequestError` naming `where`."""
    if len(data) > MAX_IMAGE_BYTES:
        raise InvalidRequestError(where, f"{len(data):,} bytes", f"an image of at most {MAX_IMAGE_BYTES:,} bytes")
    if _has_too_many_parts(data):
        raise InvalidRequestError(where, "an image file of very many parts", "one with larger parts")
    if data.startswith(PNG) and (count := data.count(PROFILE)) > MAX_PROFILES:
        raise InvalidRequestError(where, f"a PNG of {count:,}", f"a PNG of at most {MAX_PROFILES} colour profiles")
    try:
        image = _open(data)
    except Exception as error:  # a decoder raises anything for a broken header
        raise _broken(where, error) from error
    if image is None:
        raise InvalidRequestError(where, f"{len(data):,} bytes of another format", FORMATS)
    if min(image.size) < 1 or image.width * image.height > MAX_PIXELS:
        raise InvalidRequestError(where, f"{image.width} x {image.height} pixels", f"at most {MAX_PIXELS:,} pixels")
    if max(image.size) > MAX_EDGE:
        raise InvalidRequestError(where, f"an edge of {max(image.size):,} pixels", f"at most {MAX_EDGE:,} pixels")
    if image.format == "JPEG" and len(list(islice(SCAN.finditer(data), MAX_SCANS + 1))) > MAX_SCANS:
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
    if data.startswith(PNG):
        return PngImagePlugin.PngImageFile(file)
    if data.startswith(JPEG):
        return JpegImagePlugin.JpegImageFile(file)
    if data.startswith((b"GIF87a", b"GIF89a")):
        return GifImagePlugin.GifImageFile(file)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile(file)
    return None


def _has_too_many_parts(data: bytes) -> bool:
    """Return whether a file has very many chunks (PNG), or segments before its pixels (JPEG)."""
    step = _chunk_end if data.startswith(PNG) else _segment_end if data.startswith(JPEG) else None
    place = len(PNG) if data.startswith(PNG) else 2
    for _ in range(MAX_PARTS + len(data) // BYTES_PER_PART):
        place = len(data) if step is None else step(data, place)
        if place >= len(data):
            return False
    return True


def _chunk_end(data: bytes, place: int) -> int:
    return place + 12 + int.from_bytes(data[place : place + 4])


def _segment_end(data: bytes, place: int) -> int:
    if data.startswith(START_OF_SCAN, place):
        return len(data)
    marker = data[place + 1] if data[place] == START_OF_SCAN[0] and place + 1 < len(data) else 0
    if marker not in SEGMENTS:
        return place + 1  # a marker alone, padding, or a byte that Pillow skips
    return place + 2 + int.from_bytes(data[place + 2 : place + 4])


def _broken(where: str, error: Exception) -> InvalidRequestError:
    found = " ".join(f"broken: {error or type(error).__name__}"[:200].split())
    return InvalidRequestError(where, found, f"{FORMATS} that is complete")
