"""The images among the parts of a conversation.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}     OpenAI's form
    {"type": "image", "image": …}       bytes, a `pathlib.Path`, an image of Pillow, a data URL or base64

A text is never a path, and no URL is fetched: a client could make the server read its own files or its neighbours.
JSON has no bytes and no paths, so only a program in this process can name a file. A part may say `where` it is in the
request, for errors, if that is another place than in the messages.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire.core.errors import CheckpointError, InvalidRequestError
from quire.core.model_files import read_model_file
from quire.engine.images.decoding import MAX_IMAGE_BYTES

IMAGE: Final = "image"
IMAGE_URL: Final = "image_url"
TYPES: Final = (IMAGE, IMAGE_URL)
PART_KEYS: Final = frozenset({"type", IMAGE, IMAGE_URL, "where"})
MARKED: Final = {"type": IMAGE}
"""The part of a message that stands for an image once the image itself was taken out."""

SENDABLE: Final = "a data URL such as data:image/png;base64,…"
SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,31}:")
SLICE: Final = 1 << 20
"""Characters of base64 that are decoded at once, a multiple of 4."""

WHITE_SPACE: Final = dict.fromkeys(map(ord, " \t\r\n"))
NOT_FETCHED: Final = f"the image itself, as {SENDABLE}: nothing is fetched from other places"


@dataclass(frozen=True, slots=True)
class SentImage:
    """An image as it was given, and its place in the request, for errors."""

    where: str
    value: Any

    def content(self) -> Any:
        """Return the bytes of the file, or the image of Pillow itself; raises `InvalidRequestError`."""
        value = self.value
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        if isinstance(value, os.PathLike):
            try:
                return read_model_file(Path(os.fspath(value)), MAX_IMAGE_BYTES)
            except CheckpointError as error:
                raise InvalidRequestError(self.where, f"{value}: {error.value}", error.allowed) from error
        return self._bytes_of(value) if isinstance(value, str) else value

    def _bytes_of(self, text: str) -> bytes:
        if text[:5].lower() == "data:":
            head, comma, text = text.partition(",")
            if not comma or not head.lower().endswith(";base64"):
                raise InvalidRequestError(self.where, head, SENDABLE)
        elif SCHEME.match(text):
            raise InvalidRequestError(self.where, text, NOT_FETCHED)
        if len(text) // 4 * 3 > MAX_IMAGE_BYTES:
            raise InvalidRequestError(self.where, f"{len(text):,} characters", f"at most {MAX_IMAGE_BYTES:,} bytes")
        try:
            return _decoded(text)
        except ValueError:
            allowed = f"base64, or {SENDABLE}; in Python also bytes or a pathlib.Path"
            raise InvalidRequestError(self.where, text, allowed) from None


def _decoded(text: str) -> bytes:
    r"""Return the bytes of a base64 text, which may have white space; raises `ValueError`.

    In slices, because Python runs no other thread, such as a server's event loop, while it decodes one.

    >>> _decoded("aGk"), _decoded(" aG\nk= ")
    (b'hi', b'hi')
    """
    if any(chr(space) in text for space in WHITE_SPACE):
        text = "".join(text[start : start + SLICE].translate(WHITE_SPACE) for start in range(0, len(text), SLICE))
    text = text.rstrip("=")
    if "=" in text:
        raise ValueError("padding within the text")
    text += "=" * (-len(text) % 4)
    return b"".join(
        base64.b64decode(text[start : start + SLICE], validate=True) for start in range(0, len(text), SLICE)
    )


def has_images(prompt: object) -> bool:
    """Return whether a prompt is a conversation with images, which take long to read. Does not mutate.

    >>> has_images([{"role": "user", "content": [{"type": "image", "image": b"..."}]}]), has_images("text")
    (True, False)
    """
    messages = prompt if isinstance(prompt, list | tuple) else ()
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    return any(is_image(part) for content in contents if isinstance(content, list | tuple) for part in content)


def take_images(messages: Sequence[Any]) -> tuple[list[Any], list[SentImage]]:
    """Return a conversation with a plain part in place of each image, and the images. Does not mutate.

    >>> take_images([{"role": "user", "content": [{"type": "image", "image": "aGk="}]}])
    ([{'role': 'user', 'content': [{'type': 'image'}]}], [SentImage(where='messages[0].content[0]', value='aGk=')])
    """
    sent: list[SentImage] = []

    def without(message: Any, where: str) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple) or not any(map(is_image, content)):
            return message
        parts = []
        for index, part in enumerate(content):
            if is_image(part):
                sent.append(_sent(part, f"{where}.content[{index}]"))
            parts.append(MARKED if is_image(part) else part)
        return {**message, "content": parts}

    return [without(message, f"messages[{index}]") for index, message in enumerate(messages)], sent


def without_images(messages: Sequence[Any]) -> list[Any]:
    """Return a conversation whose images have lost their content, which need not be JSON. Does not mutate."""

    def without(message: Any) -> Any:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            return message
        return {**message, "content": [{"type": part["type"]} if is_image(part) else part for part in content]}

    return [without(message) for message in messages]


def is_image(part: object) -> bool:
    """Return whether a part of a content is an image."""
    return isinstance(part, Mapping) and part.get("type") in TYPES


def _sent(part: Mapping[str, Any], where: str) -> SentImage:
    """Return the image of a part; `where` is the place that the part itself names, or this one."""
    where = own if isinstance(own := part.get("where"), str) else where
    if part["type"] == IMAGE:
        if IMAGE not in part:
            found = f"a part with {', '.join(map(str, part))}"
            raise InvalidRequestError(where, found, 'a part with the image itself in "image"')
        return SentImage(where, part[IMAGE])
    url = part.get(IMAGE_URL)
    url = url.get("url") if isinstance(url, Mapping) else url
    if not isinstance(url, str) or not SCHEME.match(url):
        raise InvalidRequestError(f"{where}.image_url.url", url, SENDABLE)
    return SentImage(f"{where}.image_url.url", url)
