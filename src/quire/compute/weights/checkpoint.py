"""A model folder's tensors: one safetensors file, or shards with an index, as float32 arrays.

`Checkpoint.open` validates the header of every file, and the index against them, before anything is
mapped. Afterwards `tensor` maps a file once and returns arrays over it: float32 is a view of the
mapping (nothing is read until it is used), float16 and bfloat16 are widened into memory. bfloat16
is the upper half of a float32, so widening is a shift.

A checkpoint may have several files that claim one tensor, or an index that promises what no file
holds: both are errors here, because the alternative is a model that depends on the order of a
folder's listing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from quire.compute.arrays import ByteArray, FloatArray
from quire.compute.json_object import read_json_object
from quire.compute.weights.safetensors import TensorEntry, read_header
from quire.core.errors import CheckpointError

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
FLOAT_DTYPES: Final = ("F32", "F16", "BF16")


class Checkpoint:
    """The tensors of one model folder, by name.

    Immutable but for the mappings, which are opened when a tensor of their file is first asked for.
    """

    def __init__(self, folder: Path, entries: Mapping[str, TensorEntry]) -> None:
        self.folder = folder
        self.entries = entries
        self._mappings: dict[Path, ByteArray] = {}

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Validate the files of `folder` and return its tensors; maps nothing yet."""
        if (folder / SINGLE_FILE).is_file():
            return cls(folder, read_header(folder / SINGLE_FILE))
        if (folder / INDEX_FILE).is_file():
            return cls(folder, _read_shards(folder))
        raise CheckpointError(str(folder), "without weights", f"{SINGLE_FILE} or {INDEX_FILE} in it")

    def tensor(self, name: str) -> FloatArray:
        """Return a tensor as float32, read-only; O(1) where the file holds float32."""
        entry = self.entries[name]
        if entry.dtype not in FLOAT_DTYPES:
            where = f"{entry.file}: tensor {name!r}: dtype"
            raise CheckpointError(where, entry.dtype, f"one of {', '.join(FLOAT_DTYPES)}")
        if entry.file not in self._mappings:
            self._mappings[entry.file] = np.memmap(entry.file, dtype=np.uint8, mode="r").view(np.ndarray)
        data = self._mappings[entry.file][entry.start : entry.stop]
        tensor = _as_float32(data, entry.dtype).reshape(entry.shape)
        tensor.flags.writeable = False
        return tensor


def _as_float32(data: ByteArray, dtype: str) -> FloatArray:
    if dtype == "F32":
        # Byte ranges need not be aligned; `require` copies only then.
        return np.require(data.view("<f4"), np.float32, ["ALIGNED"])
    if dtype == "F16":
        return data.view("<f2").astype(np.float32)
    return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _read_shards(folder: Path) -> dict[str, TensorEntry]:
    index = folder / INDEX_FILE
    weight_map = _weight_map(index)
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


def _weight_map(index: Path) -> dict[str, str]:
    """Return tensor name → file name, a plain one: no index reaches out of its folder."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map", weight_map, "an object: tensor name to file name")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_name(shard):
            allowed = "the plain name of a .safetensors file in the same folder"
            raise CheckpointError(f"{index}: weight_map[{name!r}]", shard, allowed)
    return weight_map


def _is_plain_name(shard: str) -> bool:
    return shard.isprintable() and Path(shard).name == shard and shard.endswith(".safetensors")
