"""A model folder's tensors: one safetensors file, or shards with an index, as numpy arrays.

`Checkpoint.open` validates the header of every file, and the index against them, before it maps
anything. Later each file is mapped once, and tensors can be read in two dtypes:

    in the file    tensor (float32)    bfloat16_bits (uint16)
    F32            view                rounded
    F16            widened             widened, rounded
    BF16           widened             view

A view shares the mapping: the file is read only when the view is used. The other conversions make a copy in memory.

Two files with the same tensor are an error, and so is a tensor in the index that no file has: otherwise
the model would depend on the order of a folder's listing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeVar

import numpy as np

from quire.compute.arrays import ByteArray, FloatArray, HalfArray
from quire.compute.models.refusals import folder_refusal
from quire.compute.weights.bfloat16 import narrowed, widened
from quire.compute.weights.mapped_files import MappedFiles
from quire.compute.weights.safetensors import TensorEntry, read_header
from quire.compute.weights.weight_file import EVERYTHING
from quire.core.errors import CheckpointError, InvariantError
from quire.core.model_files import MAX_TENSOR_NAMES_BYTES, is_there, read_json_object

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FLOAT_DTYPES: Final = ("F32", "F16", "BF16")
OLD_ENDINGS: Final = MappingProxyType({"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"})
"""The endings that checkpoints of TensorFlow gave to names, such as those of the first BERT models, and today's."""


class Checkpoint:
    """Implements `WeightFile` with the tensors of one model folder, by name.

    Immutable except for the mappings: each is opened when a tensor of its file is first read.
    """

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.entries = entries
        sizes: dict[Path, int] = {}  # tensors fill each file to its end
        for entry in entries.values():
            sizes[entry.file] = max(entry.stop, sizes.get(entry.file, 0))
        self._files = MappedFiles(sizes)

    @property
    def name(self) -> str:
        """The path of the folder."""
        return str(self.folder)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Validate the files of `folder` and return its tensors; maps nothing yet."""
        if is_there(folder / SINGLE_FILE):
            return cls(folder, _with_new_names(read_header(folder / SINGLE_FILE)))
        if is_there(folder / INDEX_FILE):
            return cls(folder, _with_new_names(_read_shards(folder)))
        raise folder_refusal(folder, f"{SINGLE_FILE} or {INDEX_FILE}")

    def stored_name(self, name: str) -> str:
        """Return the same name: these files use it too."""
        return name

    def require_floats(self, name: str) -> None:
        """Raise unless a tensor has a dtype that can be read."""
        entry = self.entries[name]
        if entry.dtype not in FLOAT_DTYPES:
            where = f"{entry.file}: tensor {name!r}: dtype"
            raise CheckpointError(where, entry.dtype, f"one of {', '.join(FLOAT_DTYPES)}")

    def tensor(self, name: str, rows: slice = EVERYTHING) -> FloatArray:
        """Return rows of a tensor as float32, read-only; O(1) if the file has float32."""
        data, dtype, shape = self._rows(name, rows)
        if dtype == "F32":
            # Byte ranges need not be aligned; `require` copies only then.
            found = np.require(data.view("<f4"), np.float32, ["ALIGNED"])
        elif dtype == "F16":
            found = data.view("<f2").astype(np.float32)
        else:
            found = widened(data.view("<u2"))
        return _read_only(found, shape)

    def bfloat16_bits(self, name: str, rows: slice = EVERYTHING) -> HalfArray:
        """Return rows of a tensor as bfloat16, read-only; O(1) if the file has bfloat16."""
        data, dtype, shape = self._rows(name, rows)
        if dtype == "BF16":
            found = np.require(data.view("<u2"), np.uint16, ["ALIGNED"])
        else:
            found = narrowed(data.view("<f4" if dtype == "F32" else "<f2"))
        return _read_only(found, shape)

    @property
    def block_types(self) -> Mapping[str, str]:
        """Empty: these files have floats."""
        return {}

    def block_rows(self, name: str, rows: slice = EVERYTHING) -> ByteArray:
        """Raise: no tensor has blocks."""
        raise InvariantError(f"{name}: a tensor of floats has no blocks")

    def release(self) -> None:
        """Free the memory of the mapped files; views stay valid, and are read again when used."""
        self._files.release()

    def stored(self, name: str) -> ByteArray:
        """Return the bytes of a tensor of any dtype, read-only."""
        return self._bytes(name, EVERYTHING)[0]

    def _rows(self, name: str, rows: slice) -> tuple[ByteArray, str, tuple[int, ...]]:
        """Return bytes, dtype and shape of the rows of a tensor of floats."""
        self.require_floats(name)
        data, shape = self._bytes(name, rows)
        return data, self.entries[name].dtype, shape

    def _bytes(self, name: str, rows: slice) -> tuple[ByteArray, tuple[int, ...]]:
        """Return bytes and shape of the rows of a tensor."""
        entry = self.entries[name]
        start, stop, shape = entry.start, entry.stop, entry.shape
        if rows != EVERYTHING:
            row_bytes = (stop - start) // shape[0]
            start, stop = start + rows.start * row_bytes, start + rows.stop * row_bytes
            shape = (rows.stop - rows.start, *shape[1:])
        return self._files.bytes_of(entry.file, start, stop), shape


Array = TypeVar("Array", FloatArray, HalfArray)


def _read_only(array: Array, shape: tuple[int, ...]) -> Array:
    shaped = array.reshape(shape)
    shaped.flags.writeable = False
    return shaped


def _with_new_names(entries: Mapping[str, TensorEntry]) -> Mapping[str, TensorEntry]:
    """Return tensors by their names of today, as `transformers` changes them. Does not mutate."""
    found = dict(entries)
    for name in entries:
        for old, new in OLD_ENDINGS.items():
            if name.endswith(old) and name.removesuffix(old) + new not in entries:
                found[name.removesuffix(old) + new] = found.pop(name)
    return found


def _read_shards(folder: Path) -> dict[str, TensorEntry]:
    index = folder / INDEX_FILE
    weight_map = read_weight_map(index)
    entries: dict[str, TensorEntry] = {}
    for shard in sorted(set(weight_map.values())):
        for name, entry in read_header(folder / shard).items():
            if name in entries:
                found = f"in {entries[name].file.name} and in {shard}"
                raise CheckpointError(f"{folder}: tensor {name!r}", found, "in one file")
            entries[name] = entry
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file.name != shard:
            raise CheckpointError(f"{index}: tensor {name!r}", f"not in {shard}", "in the shard that is named")
    return entries


def read_weight_map(index: Path) -> dict[str, str]:
    """Return tensor name → file name. Only plain names: an index must not refer to files outside its folder."""
    weight_map = read_json_object(index, MAX_TENSOR_NAMES_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map", weight_map, "an object: tensor name to file name")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            allowed = "the plain name of a .safetensors file in the same folder"
            raise CheckpointError(f"{index}: weight_map[{name!r}]", shard, allowed)
    return weight_map


def _is_plain_name(shard: str) -> bool:
    return shard.isprintable() and Path(shard).name == shard and shard.endswith(".safetensors")
