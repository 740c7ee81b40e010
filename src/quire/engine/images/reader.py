"""ImageReader: turns the images of a conversation into text, tokens and pixels.

    headers of all images ──► sizes, within limits ──► plans: how many tokens ──► within the context ──► pixels

Decoding is the expensive step, so everything that sizes alone can refuse is refused before it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

from quire.core.errors import CheckpointError, InvalidRequestError, RequestTooLargeError
from quire.core.images import MIN_IMAGE_TOKENS, Image
from quire.core.model_files import ModelFiles
from quire.core.request import token_array
from quire.engine.images.decoding import decoded, opened
from quire.engine.images.layout import Layout, Plan
from quire.engine.images.parts import SentImage
from quire.engine.images.settings import MOST_PATCHES, ProcessorSettings
from quire.engine.text.client_text import TEMPLATE, joined, owned, owners_of, plain

if TYPE_CHECKING:
    from PIL import Image as pillow

MAX_IMAGES: Final = 64
"""The most images of a request."""

MAX_TILE_BYTES: Final = 128 << 20
"""The most bytes of a request's pixels once they are resized: an engine gets them in one message."""

MAX_ALL_PIXELS: Final = 1 << 27
"""The most pixels of all images of a request: ten photos of 12 megapixels. Decoding them takes seconds."""

TRIAL_SIZE: Final = (128, 96)
LAYOUTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "CLIPImageProcessor": "quire.engine.images.llava:LlavaLayout",
        "Gemma3ImageProcessor": "quire.engine.images.gemma3:Gemma3Layout",
        "Gemma4ImageProcessor": "quire.engine.images.gemma4:Gemma4Layout",
        "Gemma4UnifiedImageProcessor": "quire.engine.images.gemma4:Gemma4Layout",
        "Glm46VImageProcessor": "quire.engine.images.glm4v:Glm4VLayout",
        "Glm4vImageProcessor": "quire.engine.images.glm4v:Glm4VLayout",
        "GotOcr2ImageProcessor": "quire.engine.images.internvl:InternVLLayout",
        "Idefics3ImageProcessor": "quire.engine.images.idefics3:Idefics3Layout",
        "Lfm2VlImageProcessor": "quire.engine.images.lfm2_vl:Lfm2VLLayout",
        "LlavaImageProcessor": "quire.engine.images.llava:LlavaLayout",
        "LlavaNextImageProcessor": "quire.engine.images.llava_next:LlavaNextLayout",
        "PixtralImageProcessor": "quire.engine.images.pixtral:PixtralLayout",
        "Qwen2VLImageProcessor": "quire.engine.images.qwen2_vl:Qwen2VLLayout",
        "Qwen2_5_VLImageProcessor": "quire.engine.images.qwen2_vl:Qwen2VLLayout",
        "SiglipImageProcessor": "quire.engine.images.llava:LlavaLayout",
        "SmolVLMImageProcessor": "quire.engine.images.idefics3:Idefics3Layout",
    }
)
"""The class that prepares images in `transformers` → the layout."""

NumRows: TypeAlias = Callable[[int, int, int], int]
"""From height, width and a number of placeholders to the number of rows."""

GIVEN: Final = "bytes, a pathlib.Path, an image of Pillow, a data URL or base64"


@dataclass(frozen=True, slots=True)
class Tile:
    """The pixels of a tile, and its tokens."""

    tokens: tuple[str, ...]
    height: int
    width: int
    pixels: bytes
    is_whole: bool = False


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image in a prompt: the text in place of its marker, and its tiles, one for each placeholder in the text."""

    text: str
    tiles: tuple[Tile, ...]


class ImageReader:
    """Reads images for one model. Immutable; threads can share it."""

    def __init__(self, layout: Layout, *, max_tokens: int, num_rows: NumRows | None = None) -> None:
        """Make a reader; images with more tokens than `max_tokens` are refused.

        `num_rows`: the rows that the image encoder makes of a tile of a height and width, for a number of placeholders,
        0: it does not take that size; None: any number.
        """
        self.marker = layout.marker
        self.placeholder = layout.placeholder
        self.placeholder_id: int | None = None  # in the model's settings, which the vocabulary must agree with
        self.tokens = layout.tokens
        self._layout = layout
        self._max_tokens = max_tokens
        self._num_rows = num_rows

    @classmethod
    def open(
        cls,
        files: ModelFiles,
        *,
        max_tokens: int,
        num_rows: NumRows | None = None,
        max_patches: int = MOST_PATCHES,
        placeholder_id: int | None = None,
    ) -> ImageReader:
        """Return the reader of a model folder; `max_patches`: the most patches of an image that its encoder takes.

        `placeholder_id`: the token that takes rows of the image encoder, by the model's settings; None: not known.
        Raises `CheckpointError` if no layout is known for it, or the image encoder makes other numbers of rows.
        """
        settings = ProcessorSettings.read(files, max_patches)
        kind = settings.kind()
        if kind not in LAYOUTS:
            allowed = f"one of {', '.join(LAYOUTS)}; with --mmproj none, the model reads texts only"
            raise CheckpointError(f"{settings.where}: image_processor_type", kind, allowed)
        module, _, name = LAYOUTS[kind].partition(":")
        layout: Layout = getattr(import_module(module), name).read(settings)
        reader = cls(layout, max_tokens=max_tokens, num_rows=num_rows)
        if num_rows is not None:
            reader._require_rows(num_rows, settings.where)
        reader.placeholder_id = placeholder_id
        return reader

    def _require_rows(self, num_rows: NumRows, where: str) -> None:
        from PIL import Image as pillow

        try:
            tiles = self._tiles(pillow.new("RGB", TRIAL_SIZE), where).tiles
        except InvalidRequestError as error:
            raise CheckpointError(f"{where}: a usual image", error.value, error.allowed) from error
        for tile in tiles:
            found = tile.tokens.count(self.placeholder)
            expected = num_rows(tile.height, tile.width, found)
            if found != expected:
                allowed = f"{expected}, as many as its image encoder makes"
                raise CheckpointError(f"{where}: tokens of {tile.height} x {tile.width} pixels", found, allowed)

    def read(self, sent: Sequence[SentImage]) -> list[ReadImage]:
        """Return images as text, tokens and pixels; raises `InvalidRequestError`. Does not mutate."""
        if len(sent) > MAX_IMAGES:
            raise InvalidRequestError("messages", f"{len(sent)} images", f"at most {MAX_IMAGES} images")
        opened_images: list[tuple[str, pillow.Image]] = []
        num_pixels = 0
        for each in sent:
            opened_images.append((each.where, _opened(each)))
            num_pixels += opened_images[-1][1].width * opened_images[-1][1].height
            if num_pixels > MAX_ALL_PIXELS:  # counted one by one, because an open GIF can take a byte for each
                allowed = f"images of at most {MAX_ALL_PIXELS:,} pixels together"
                raise InvalidRequestError("messages", f"images of {num_pixels:,} pixels", allowed)
        plans = [self._plan(where, image) for where, image in opened_images]
        num_tokens = sum(plan.num_tokens for plan in plans)
        if num_tokens > self._max_tokens:
            allowed = f"at most {self._max_tokens} tokens, the context; send fewer or smaller images"
            raise RequestTooLargeError("messages", f"images of {num_tokens} tokens", allowed)
        found, num_bytes = list[ReadImage](), 0
        opened_images.reverse()
        while opened_images:
            found.append(self._read(*opened_images.pop()))  # which frees its decoded pixels
            num_bytes += sum(len(tile.pixels) for tile in found[-1].tiles)
            if num_bytes > MAX_TILE_BYTES:
                allowed = f"images of at most {MAX_TILE_BYTES:,} bytes of pixels after resizing; send fewer"
                raise RequestTooLargeError("messages", f"images of {num_bytes:,} bytes", allowed)
        return found

    def _plan(self, where: str, image: pillow.Image) -> Plan:
        size = f"{image.width} x {image.height} pixels"
        try:
            plan = self._layout.plan(image.height, image.width)
        except ValueError as error:
            raise InvalidRequestError(where, size, str(error)) from error
        if min(map(len, plan.tiles)) < MIN_IMAGE_TOKENS:
            raise InvalidRequestError(where, size, f"an image of at least {MIN_IMAGE_TOKENS} tokens, which is larger")
        return plan

    def _read(self, where: str, image: pillow.Image) -> ReadImage:
        read = self._tiles(decoded(image, where), where)
        for tile in read.tiles:
            size, count = f"{tile.width} x {tile.height} pixels", tile.tokens.count(self.placeholder)
            if self._num_rows is not None and self._num_rows(tile.height, tile.width, count) != count:
                raise InvalidRequestError(where, f"resized to {size}", "a size that the image encoder takes")
        return read

    def _tiles(self, image: pillow.Image, where: str) -> ReadImage:
        plan = self._plan(where, image)  # again: it may have been turned upright
        tiles = (
            Tile(tokens, tile.height, tile.width, tile.tobytes(), self._layout.is_whole)
            for tokens, tile in zip(plan.tiles, self._layout.tiles(image), strict=True)
        )
        return ReadImage(plan.text, tuple(tiles))


def with_texts(rendered: str, marker: str, images: Sequence[ReadImage]) -> str:
    """Return a rendered conversation with the text of each image in place of its marker. Does not mutate.

    Only markers that the template wrote count; raises `InvalidRequestError` if it did not write one for each image.
    """
    text, owners = plain(rendered), owners_of(rendered)
    starts = [match.start() for match in re.finditer(re.escape(marker), text)]
    starts = [start for start in starts if set(owners[start : start + len(marker)]) == {TEMPLATE}]
    if len(starts) != len(images):
        allowed = f"images in messages where this model takes them: its chat template wrote {len(starts)} of them"
        raise InvalidRequestError("messages", f"{len(images)} images", allowed)
    pieces, end = list[str](), 0
    for start, image in zip(starts, images, strict=True):
        pieces += [owned(text[end:start], owners[end:start]), image.text]
        end = start + len(marker)
    return joined("", [*pieces, owned(text[end:], owners[end:])])


def placed(
    ids: Sequence[int], placeholder: str, images: Sequence[ReadImage], id_of: Callable[[str], int | None]
) -> tuple[array[int], tuple[Image, ...]]:
    """Return the tokens of a prompt and its images: each placeholder becomes those of its tile. Does not mutate."""
    tiles = [tile for image in images for tile in image.tiles]
    id_of_text = {text: id_of(text) for tile in tiles for text in {placeholder, *tile.tokens}}
    places = [place for place, token_id in enumerate(ids) if token_id == id_of_text.get(placeholder)]
    if len(places) != len(tiles):
        raise InvalidRequestError("messages", f"text with {placeholder}", f"text without {placeholder}")
    tokens, found, end = list[int | None](), list[Image](), 0
    for place, tile in zip(places, tiles, strict=True):
        tokens += ids[end:place]
        size, whole = (tile.height, tile.width), tile.is_whole
        found.append(Image.of(len(tokens), len(tile.tokens), *size, tile.pixels, is_whole=whole))
        tokens += map(id_of_text.__getitem__, tile.tokens)
        end = place + 1
    return token_array(cast(list[int], [*tokens, *ids[end:]])), tuple(found)


def _opened(sent: SentImage) -> pillow.Image:
    content: Any = sent.content()
    if isinstance(content, bytes):
        return opened(content, sent.where)
    from PIL import Image as pillow

    if not isinstance(content, pillow.Image):
        raise InvalidRequestError(sent.where, content, GIVEN)
    return content.copy()  # decoding changes it
