"""Reads the header of one safetensors file, and trusts it only after checking every field.

    0          8                 8 + N                      end of file
    ├── N ─────┼── JSON header ──┼── bytes of the tensors ──┤
                                 ├ a ┼── b ──┼ c ┼ …        no gap, no overlap, nothing left over

The format is small, so quire reads it without a dependency. A hostile file can only be refused. The
header gives a dtype, a shape and a range of bytes for each tensor. All are compared with the file
before any byte of a tensor is read. A range that does not match its shape, is past the end, overlaps
another or leaves a gap raises a `CheckpointError` that names the file, the value and the allowed values.
Nothing is mapped here; `quire.compute.weights.checkpoint` maps the checked ranges.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.core.errors import CheckpointError
from quire.core.model_files import (
    LFS_POINTER,
    MAX_TENSOR_NAMES_BYTES,
    incomplete,
    lfs_pointer,
    open_model_file,
    parse_json_object,
    unreadable,
)

DTYPE_BYTES: Final = MappingProxyType(
    {
        "BOOL": 1,
        "U8": 1,
        "I8": 1,
        "F8_E4M3": 1,
        "F8_E5M2": 1,
        "U16": 2,
        "I16": 2,
        "F16": 2,
        "BF16": 2,
        "U32": 4,
        "I32": 4,
        "F32": 4,
        "U64": 8,
        "I64": 8,
        "F64": 8,
    }
)
LENGTH_BYTES: Final = 8
METADATA_KEY: Final = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The place of a tensor: bytes `start` up to `stop` of `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of the file at `path` by name, after checking every field of its header."""
    try:
        with open_model_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(len(LFS_POINTER)) or b""
            if start == LFS_POINTER:
                raise lfs_pointer(str(path))
            length = _header_length(start[:LENGTH_BYTES], size, path)
            file.seek(LENGTH_BYTES)
            header = parse_json_object(file.read(length), f"{path}: header")
    except OSError as error:
        raise unreadable(path, error) from error
    _check_metadata(header.pop(METADATA_KEY, {}), path)
    data_start = LENGTH_BYTES + length
    entries = [_entry(path, name, fields, data_start) for name, fields in header.items()]
    _check_ranges(entries, data_start, size, path)
    return {entry.name: entry for entry in entries}


def _header_length(prefix: bytes, file_size: int, path: Path) -> int:
    if len(prefix) < LENGTH_BYTES:
        raise incomplete(path, file_size, LENGTH_BYTES)
    length = int.from_bytes(prefix, "little")
    if not 2 <= length <= MAX_TENSOR_NAMES_BYTES:
        raise CheckpointError(f"{path}: header length", length, f"2 to {MAX_TENSOR_NAMES_BYTES}")
    if length > file_size - LENGTH_BYTES:
        raise incomplete(path, file_size, LENGTH_BYTES + length)
    return length


def _check_metadata(metadata: object, path: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{path}: {METADATA_KEY}", metadata, "an object of strings")


def _entry(path: Path, name: str, fields: object, data_start: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(where, fields, "an object of dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(f"{where}: dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where}: shape", shape, "a list of integers from 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets", offsets, "two integers, 0 <= begin <= end")
    num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != num_bytes:
        allowed = f"a range of {num_bytes} bytes, which {dtype} of shape {shape} takes"
        raise CheckpointError(f"{where}: data_offsets", offsets, allowed)
    start, stop = data_start + offsets[0], data_start + offsets[1]
    return TensorEntry(path, name, dtype, tuple(shape), start, stop)


def _are_sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_ranges(entries: list[TensorEntry], data_start: int, size: int, path: Path) -> None:
    """Raise unless the ranges are contiguous from the header to the end of the file."""
    end = data_start
    for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
        if entry.start != end:
            problem = "an overlap" if entry.start < end else "a gap"
            found = f"{problem}: begins at byte {entry.start - data_start}"
            allowed = f"{end - data_start}, where the tensor before it ends"
            raise CheckpointError(f"{path}: tensor {entry.name!r}", found, allowed)
        end = entry.stop
    if end > size:
        raise incomplete(path, size, end)
    if end < size:
        allowed = f"{end} bytes, as its header says"
        raise CheckpointError(f"{path}: size", size, allowed)
