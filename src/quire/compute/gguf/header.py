"""The header of a GGUF file: settings by name and the place of each tensor, all checked before anything is mapped.

    "GGUF", version, counts ─► pairs: key, type, value ─► tensors: name, dimensions, type, offset ─► padding ─► data

All numbers are little-endian. A file may be hostile: every count, length and offset is compared with the size of the
file before it is used, so a header of a few bytes cannot cost much memory or time.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Final

import numpy as np

from quire.compute.gguf.blocks import BLOCK_TYPES, BlockType
from quire.core.errors import CheckpointError, InvariantError
from quire.core.model_files import LFS_POINTER, incomplete, lfs_pointer, open_model_file, unreadable

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ALIGNMENT_KEY: Final = "general.alignment"
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 1 << 16
MAX_HEADER_BYTES: Final = 64 << 20
"""Four times the need of the largest published vocabulary."""
MAX_PAIRS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 18
MAX_NAME_BYTES: Final = 1 << 10
MAX_TEXT_BYTES: Final = 16 << 20
MAX_ITEMS: Final = 4_000_000
"""The most items of all lists together: twice the largest published vocabulary with scores, types and merges."""
MAX_DIMENSIONS: Final = 4
WINDOW_BYTES: Final = 4 << 20
LENGTH: Final = struct.Struct("<Q")
"""The length before a text."""
PART: Final = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII | re.IGNORECASE)
MAX_PARTS: Final = 1000

STRING: Final = 8
ARRAY: Final = 9
BOOL: Final = 7
NUMBERS: Final = MappingProxyType(
    {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
)
"""The type of a value → the dtype of its numbers."""

Scalar = bool | int | float | str


def is_gguf(path: Path) -> bool:
    """Return whether a path is the name of a GGUF file."""
    return path.suffix.lower() == ".gguf"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file: its shape with the rows first, the type of its numbers, and its bytes from `start` on."""

    file: Path
    shape: tuple[int, ...]
    type: BlockType
    start: int

    @property
    def num_bytes(self) -> int:
        """The number of its bytes."""
        return prod(self.shape) // self.type.size * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The content of a file before its data; for a model in several files, of all headers together.

    `file_bytes`: the size of each file when it was read.
    """

    path: Path
    settings: Mapping[str, object]
    tensors: Mapping[str, GgufTensor]
    file_bytes: Mapping[Path, int]

    @classmethod
    def read(cls, path: Path) -> GgufHeader:
        """Read and check the header of a model, of all its files; raises `CheckpointError` that names the problem."""
        split = PART.fullmatch(path.name)
        if split is None:
            return cls.read_one(path)
        if not 1 <= int(split["number"]) <= int(split["count"]) <= MAX_PARTS:
            raise CheckpointError(
                str(path), f"part {split['number']} of {split['count']}", f"at most {MAX_PARTS} parts"
            )
        names = parts_of(path.name)
        return _joined((cls.read_one(path.with_name(name)) for name in names), len(names))

    @classmethod
    def read_one(cls, path: Path) -> GgufHeader:
        """Read and check the header of one file."""
        try:
            with open_model_file(path) as file:
                return cls._of(path, _Cursor(file, path))
        except OSError as error:
            raise unreadable(path, error) from error

    @classmethod
    def _of(cls, path: Path, cursor: _Cursor) -> GgufHeader:
        num_tensors, num_pairs = _counts(cursor)
        settings: dict[str, object] = {}
        for _ in range(num_pairs):
            key = cursor.text("the name of a setting", MAX_NAME_BYTES)
            if key in settings:
                raise cursor.error(f"setting {key!r}", "given twice", "each once")
            settings[key] = _value(cursor, f"setting {key!r}")
        claims = [_claim(cursor) for _ in range(num_tensors)]
        alignment = _alignment(cursor, settings)
        start = -(-cursor.position // alignment) * alignment
        return cls(path, settings, _placed(cursor, claims, start, alignment), {path: cursor.file_bytes})


def parts_of(name: str) -> list[str]:
    """Return the file names of a model, at most `MAX_PARTS`, given one of them; only this name for a single file.

    >>> parts_of("m-00002-of-00002.gguf"), parts_of("m.gguf")
    (['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf'], ['m.gguf'])
    """
    split = PART.fullmatch(name)
    if split is None:
        return [name]
    stem, count, ending = split["stem"], int(split["count"]), name[-len(".gguf") :]
    return [f"{stem}-{number:05d}-of-{count:05d}{ending}" for number in range(1, min(count, MAX_PARTS) + 1)]


def _joined(parts: Iterator[GgufHeader], count: int) -> GgufHeader:
    """Return the header of a model in several files; the first has the settings. Holds one part at a time."""
    tensors: dict[str, GgufTensor] = {}
    file_bytes: dict[Path, int] = {}
    first: GgufHeader | None = None
    for number, part in enumerate(parts):
        first = first or part
        file_bytes |= part.file_bytes
        for field, expected in (("split.no", number), ("split.count", count)):
            if part.settings.get(field) != expected:
                raise CheckpointError(f"{part.path}: {field}", part.settings.get(field), f"{expected}, as in its name")
        for name, tensor in part.tensors.items():
            if name in tensors:
                found = f"in {tensors[name].file.name} and in {part.path.name}"
                raise CheckpointError(f"{part.path}: tensor {name!r}", found, "in one part")
            tensors[name] = tensor
        if len(tensors) > MAX_TENSORS:
            raise CheckpointError(f"{part.path}: tensors up to here", len(tensors), f"at most {MAX_TENSORS}")
    if first is None:
        raise InvariantError("a model of no parts")
    expected_tensors = first.settings.get("split.tensors.count", len(tensors))
    if expected_tensors != len(tensors):
        raise CheckpointError(
            f"{first.path}: tensors of all parts", len(tensors), f"{expected_tensors}, as in its settings"
        )
    return GgufHeader(first.path, first.settings, tensors, file_bytes)


class _Cursor:
    """Reads a header from its beginning to its end, a window of the file at a time. Mutable."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file_bytes = os.fstat(file.fileno()).st_size
        self.num_items = 0  # of lists
        self._file = file
        self.path = path
        self._window = file.read(WINDOW_BYTES)
        self._start = 0  # of the window in the file
        self._at = 0  # in the window

    @property
    def position(self) -> int:
        """The number of bytes read so far."""
        return self._start + self._at

    def error(self, what: str, found: object, allowed: str) -> CheckpointError:
        """Return the error for a part of the header."""
        return CheckpointError(f"{self.path}: {what}", found, allowed)

    def take(self, count: int, what: str) -> bytes:
        """Return the next bytes; raises if the file or the largest header ends before. Mutates."""
        end = self._at + count
        if end > len(self._window):
            self._read_on(count, what)
            end = self._at + count
        found = self._window[self._at : end]
        self._at = end
        return found

    def number(self, form: str, what: str) -> int:
        """Return the next integer in `struct`'s format `form`. Mutates."""
        found: int = struct.unpack(form, self.take(struct.calcsize(form), what))[0]
        return found

    def text(self, what: str, max_bytes: int = MAX_TEXT_BYTES) -> str:
        """Return the next string. Mutates."""
        length = self.number("<Q", what)
        if length > max_bytes:
            raise self.error(f"{what}: length", length, f"at most {max_bytes} bytes")
        return self._decoded(self.take(length, what), what)

    def texts(self, count: int, what: str) -> list[str]:
        """Return the next strings. They are most of a header, so all within the window are read at once. Mutates."""
        found: list[str] = []
        while len(found) < count:
            window, at = self._window, self._at
            for _ in range(count - len(found)):
                start = at + LENGTH.size
                if start > len(window):
                    break
                length: int = LENGTH.unpack_from(window, at)[0]
                if length > MAX_TEXT_BYTES or start + length > len(window):
                    break
                at = start + length
                found.append(self._decoded(window[start:at], what))
            self._at = at
            if len(found) < count:
                found.append(self.text(what))
        return found

    def _decoded(self, data: bytes, what: str) -> str:
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(what, data[:40], "text in UTF-8") from error

    def _read_on(self, count: int, what: str) -> None:
        if self.position + count > min(self.file_bytes, MAX_HEADER_BYTES):
            if self.file_bytes <= MAX_HEADER_BYTES:
                raise incomplete(self.path, self.file_bytes, self.position + count)
            raise self.error("header", f"over {MAX_HEADER_BYTES} bytes", "a smaller one")
        rest = self._window[self._at :]
        self._start += self._at
        self._window, self._at = rest + self._file.read(max(WINDOW_BYTES, count - len(rest))), 0
        if len(self._window) < count:
            raise self.error(what, "cut off: the file has been made shorter", "a complete file")


def _counts(cursor: _Cursor) -> tuple[int, int]:
    """Return the numbers of tensors and settings that follow."""
    magic = cursor.take(len(MAGIC), "file")
    if LFS_POINTER.startswith(magic):
        raise lfs_pointer(str(cursor.path))
    if magic != MAGIC:
        raise cursor.error("file", f"one that begins with {magic!r}", "a GGUF file")
    version = cursor.number("<I", "version")
    if version not in VERSIONS:
        found = "big-endian" if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS else version
        raise cursor.error("version", found, "2 or 3, little-endian")
    num_tensors, num_pairs = cursor.number("<Q", "counts"), cursor.number("<Q", "counts")
    for what, count, most in (("tensors", num_tensors, MAX_TENSORS), ("settings", num_pairs, MAX_PAIRS)):
        if count > most:
            raise cursor.error(f"number of {what}", count, f"at most {most}")
    return num_tensors, num_pairs


def _value(cursor: _Cursor, what: str) -> object:
    """Return the value of a setting: a number, a boolean, a text, or a list of these."""
    kind = cursor.number("<I", what)
    if kind == STRING:
        return cursor.text(what)
    if kind == ARRAY:
        return _items(cursor, what)
    return _numbers(cursor, kind, 1, what)[0]


def _items(cursor: _Cursor, what: str) -> list[Scalar]:
    kind, count = cursor.number("<I", what), cursor.number("<Q", what)
    if kind == ARRAY:
        raise cursor.error(what, "a list of lists", "a list of numbers or texts")
    cursor.num_items += count
    if cursor.num_items > MAX_ITEMS:
        raise cursor.error(f"{what}: length", count, f"lists of at most {MAX_ITEMS} items together")
    if kind == STRING:
        return list(cursor.texts(count, what))
    return _numbers(cursor, kind, count, what)


def _numbers(cursor: _Cursor, kind: int, count: int, what: str) -> list[Scalar]:
    if kind not in NUMBERS:
        raise cursor.error(f"{what}: type", kind, "a type of GGUF, from 0 to 12")
    dtype = np.dtype(NUMBERS[kind])
    found = np.frombuffer(cursor.take(count * dtype.itemsize, what), dtype)
    if kind != BOOL:
        return list(found.tolist())
    if (found > 1).any():
        raise cursor.error(what, int(found.max()), "a boolean: 0 or 1")
    return [bool(each) for each in found]


@dataclass(frozen=True, slots=True)
class _Claim:
    """The header's claim about a tensor; the offset counts from the beginning of the data."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int


def _claim(cursor: _Cursor) -> _Claim:
    name = cursor.text("the name of a tensor", MAX_NAME_BYTES)
    what = f"tensor {name!r}"
    num_dimensions = cursor.number("<I", what)
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise cursor.error(f"{what}: number of dimensions", num_dimensions, f"from 1 to {MAX_DIMENSIONS}")
    dimensions = struct.unpack(f"<{num_dimensions}Q", cursor.take(8 * num_dimensions, what))
    type_number, offset = cursor.number("<I", what), cursor.number("<Q", what)
    if type_number not in BLOCK_TYPES:
        known = ", ".join(each.name for each in BLOCK_TYPES.values())
        raise cursor.error(f"{what}: type", f"number {type_number}", f"one of {known}")
    block = BLOCK_TYPES[type_number]
    if 0 in dimensions or prod(dimensions) >> 63:
        raise cursor.error(f"{what}: dimensions", list(dimensions), "numbers above 0 with a product below 2^63")
    if prod(dimensions) > cursor.file_bytes * block.size:
        needed = cursor.position + prod(dimensions) // block.size * block.num_bytes
        raise incomplete(cursor.path, cursor.file_bytes, needed)
    if block.size > 1 and num_dimensions == 1:
        raise cursor.error(f"{what}: type", block.name, "a type of single numbers, because it has one dimension")
    if dimensions[0] % block.size:
        raise cursor.error(f"{what}: row", f"{dimensions[0]} numbers", f"a multiple of {block.size} for {block.name}")
    return _Claim(name, dimensions[::-1], block, offset)


def _alignment(cursor: _Cursor, settings: Mapping[str, object]) -> int:
    alignment = settings.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(ALIGNMENT_KEY, alignment, f"a power of two from 8 to {MAX_ALIGNMENT}")
    return alignment


def _placed(cursor: _Cursor, claims: list[_Claim], start: int, alignment: int) -> dict[str, GgufTensor]:
    """Return the tensors by name; raises unless each begins at the end of the previous one, up to the alignment."""
    tensors: dict[str, GgufTensor] = {}
    for claim in claims:
        what = f"tensor {claim.name!r}"
        if claim.name in tensors:
            raise cursor.error(what, "given twice", "each once")
        tensor = GgufTensor(cursor.path, claim.shape, claim.type, start + claim.offset)
        if claim.offset % alignment:
            raise cursor.error(f"{what}: offset", claim.offset, f"a multiple of {alignment}")
        tensors[claim.name] = tensor
    end = max((each.start + each.num_bytes for each in tensors.values()), default=0)
    if end > cursor.file_bytes:
        raise incomplete(cursor.path, cursor.file_bytes, end)
    in_order = sorted(tensors.items(), key=lambda each: each[1].start)
    for (_, before), (name, tensor) in pairwise(in_order):
        end = before.start + before.num_bytes
        if tensor.start < end:
            allowed = f"at least {end - start}, where the tensor before it ends"
            raise cursor.error(f"tensor {name!r}: offset", tensor.start - start, allowed)
    return tensors


def same_number(found: Any) -> Any:
    """Return the number of a list with the same number for each layer, which Granite 4 has; else the same value."""
    return found[0] if isinstance(found, list) and found and all(item == found[0] for item in found) else found
