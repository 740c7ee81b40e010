"""The tensors of a quantised folder, under the names in the original model.

    model.layers.0.mlp.up_proj.qweight, .qzeros, .scales, .g_idx ──► model.layers.0.mlp.up_proj.weight [out, in]

The tensors show which matrices are quantised; shapes and dtypes are checked before any tensor is mapped. A matrix is
available as floats, and as blocks if they hold its weights to the bit (blocks.py). Both are made a few rows at a time,
so that temporary memory stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray, FloatArray, HalfArray
from quire.compute.quantized import blocks
from quire.compute.quantized.gptq import Gptq
from quire.compute.quantized.matrix import Groups, MatrixParts, Method
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.safetensors import TensorEntry
from quire.compute.weights.weight_file import EVERYTHING, WeightEntry
from quire.core.errors import CheckpointError, InvariantError

CHUNK: Final = 1 << 20  # numbers widened at a time
LOOK: Final = 1 << 24  # numbers whose scales are checked at a time
MAX_DEPTH: Final = 32  # of modules within modules
SCALES_OF_KV: Final = (".k_scale", ".v_scale")  # for KV memory in fp8, which quire does not support


@dataclass(frozen=True, slots=True)
class QuantizedEntry:
    """A quantised matrix: its dtype and shape, and its parts."""

    dtype: str
    shape: tuple[int, int]
    parts: MatrixParts


class QuantizedTensors:
    """Implements `WeightFile` over a `Checkpoint` whose matrices are quantised by a method."""

    def __init__(self, checkpoint: Checkpoint, method: Method) -> None:
        self._checkpoint = checkpoint
        self._method = method
        self._unconverted = frozenset(method.unconverted)
        self._matrices = {f"{parts.stem}.weight": self._entry(parts) for parts in self._all_parts()}
        taken = {entry.name for matrix in self._matrices.values() for entry in matrix.parts.entries.values()}
        plain = {
            name: entry
            for name, entry in checkpoint.entries.items()
            if name not in taken and not name.endswith(SCALES_OF_KV)
        }
        for name in self._matrices.keys() & plain.keys():
            raise CheckpointError(
                f"{self.name}: tensor {name!r}", "given twice", f"it or its {method.marker}, not both"
            )
        if isinstance(method, Gptq):
            plain = {name: entry for name, entry in plain.items() if not self._is_empty_bias(entry)}
        self.entries: Mapping[str, WeightEntry] = MappingProxyType({**plain, **self._matrices})

    @property
    def name(self) -> str:
        """The path of the folder."""
        return self._checkpoint.name

    @cached_property
    def block_types(self) -> Mapping[str, str]:
        """The types of the blocks that hold a matrix to the bit. Reads scales and zero points, no codes."""
        types = {name: self._exact_type(entry) for name, entry in self._matrices.items()}
        self.release()
        return MappingProxyType({name: kind for name, kind in types.items() if kind})

    def block_rows(self, name: str, rows: slice = EVERYTHING) -> ByteArray:
        """Return rows of a matrix as blocks of its type, read-only."""
        if name not in self.block_types:
            raise InvariantError(f"{name}: no blocks are its weights to the bit")
        kind, (num_rows, num_inputs) = self.block_types[name], self._shape(name, rows)
        result = np.empty((num_rows, blocks.row_bytes(kind, num_inputs)), np.uint8)
        for start, codes, groups in self._pieces(name, rows):
            result[start : start + len(codes)] = blocks.blocks_of(kind, codes, groups)
        result.flags.writeable = False
        return result

    def stored_name(self, name: str) -> str:
        """Return the same name: these files use it too."""
        return name

    def require_floats(self, name: str) -> None:
        """Raise unless a tensor is quantised or floats."""
        if name not in self._matrices:
            self._checkpoint.require_floats(name)

    def tensor(self, name: str, rows: slice = EVERYTHING) -> FloatArray:
        """Return rows of a tensor as float32, read-only."""
        if name not in self._matrices:
            return self._checkpoint.tensor(name, rows)
        result = np.empty(self._shape(name, rows), np.float32)
        for start, codes, groups in self._pieces(name, rows):
            result[start : start + len(codes)] = groups.scaled(codes)
        result.flags.writeable = False
        return result

    def bfloat16_bits(self, name: str, rows: slice = EVERYTHING) -> HalfArray:
        """Return rows of a tensor as bfloat16, read-only."""
        if name not in self._matrices:
            return self._checkpoint.bfloat16_bits(name, rows)
        result = np.empty(self._shape(name, rows), np.uint16)
        for start, codes, groups in self._pieces(name, rows):
            result[start : start + len(codes)] = narrowed(groups.scaled(codes))
        result.flags.writeable = False
        return result

    def release(self) -> None:
        """Free the memory of the mapped files."""
        self._checkpoint.release()

    def _all_parts(self) -> Iterator[MatrixParts]:
        """Yield the parts of each quantised matrix."""
        entries, method = self._checkpoint.entries, self._method
        for name in entries:
            stem = name.removesuffix(f".{method.marker}")
            if stem != name:
                names = {side: f"{stem}.{side}" for side in (method.marker, *method.sides)}
                found = {side: entries[full] for side, full in names.items() if full in entries}
                yield MatrixParts(self._checkpoint, stem, MappingProxyType(found))

    def _entry(self, parts: MatrixParts) -> QuantizedEntry:
        if not self._unconverted.isdisjoint(_modules_of(parts.stem)):
            where = f"{self.name}: matrix {parts.stem!r}"
            raise CheckpointError(where, "quantised", "floats: its config says that it was not converted")
        return QuantizedEntry(self._method.name, self._method.shape(parts), parts)

    def _is_empty_bias(self, entry: TensorEntry) -> bool:
        """Return whether a tensor is the bias of zeros that GPTQ packers add to every matrix."""
        stem, _, part = entry.name.rpartition(".")
        matrix = self._matrices.get(f"{stem}.weight")
        if part != "bias" or matrix is None or entry.shape != matrix.shape[:1]:
            return False
        return not self._checkpoint.tensor(entry.name).any()

    def _shape(self, name: str, rows: slice) -> tuple[int, int]:
        out, num_inputs = self._matrices[name].shape
        return len(range(out)[rows]), num_inputs

    def _exact_type(self, entry: QuantizedEntry) -> str:
        """Return the block type in which a matrix is available; empty if in none."""
        method, (out, num_inputs) = self._method, entry.shape
        if not all(entry.shape):
            return ""
        step, order, kind = max(1, LOOK // num_inputs), list(blocks.BLOCKS), ""
        for start in range(0, out, step):
            groups = method.groups(entry.parts, slice(start, min(start + step, out)))
            of_rows = blocks.exact_type(groups, num_inputs)
            if not of_rows:
                return ""
            kind = max(kind or of_rows, of_rows, key=order.index)
        return kind

    def _pieces(self, name: str, rows: slice) -> Iterator[tuple[int, NDArray[Any], Groups]]:
        """Yield a few rows of a matrix at a time: the first row's index, the codes, and their groups."""
        parts, chosen = self._matrices[name].parts, range(self._matrices[name].shape[0])[rows]
        step = max(1, CHUNK // max(1, self._matrices[name].shape[1]))
        for start in range(0, len(chosen), step):
            piece = chosen[start : start + step]
            some = slice(piece.start, piece.stop)
            yield start, self._method.codes(parts, some), self._method.groups(parts, some)


def _modules_of(stem: str) -> Iterator[str]:
    """Yield a module and its parents."""
    names = stem.split(".", MAX_DEPTH)
    return (".".join(names[: depth + 1]) for depth in range(len(names)))
