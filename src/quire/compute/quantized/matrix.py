"""One quantised matrix of a folder: its tensors, and the arithmetic that all methods share.

A weight is (code - zero point) × scale. Codes are integers packed in words of 32 bits, lowest bits first, or bytes.
Scales belong to groups of consecutive inputs, or to the group that `g_idx` names for each input. Differences are exact
in float32 and the product rounds at most once, so every correct reader gets the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray, FloatArray, IntArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.weights.bfloat16 import widened
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.safetensors import TensorEntry
from quire.core.errors import CheckpointError, ModelError

STORED: Final = MappingProxyType(
    {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "i1", "U8": "u1", "F8_E4M3": "u1", "I32": "<i4", "I64": "<i8"}
)
IN_ORDER: Final = (0, 1, 2, 3, 4, 5, 6, 7)
ADVICE: Final = (
    "Use the model from before it was quantised, with --weights int8 or int4, a GGUF file, or a folder quantised"
    " by GPTQ, AWQ (gemm), AutoRound, compressed-tensors, bitsandbytes, ModelOpt, mxfp4 or fp8"
)


@dataclass(frozen=True, slots=True)
class MatrixParts:
    """The tensors of one matrix, by the part of their names after the stem, such as `qweight`."""

    checkpoint: Checkpoint
    stem: str
    entries: Mapping[str, TensorEntry]

    def shape(self, part: str, *dtypes: str, dimensions: int = 2) -> tuple[int, ...]:
        """Return the shape of a part; raises if it is missing, or has another dtype or number of dimensions."""
        if part not in self.entries:
            raise self.error(f"without {self.stem}.{part}", "with every tensor that its method has")
        entry = self.entries[part]
        if entry.dtype not in dtypes:
            raise self._error(part, "dtype", entry.dtype, f"one of {', '.join(dtypes)}")
        if len(entry.shape) != dimensions:
            raise self._error(part, "shape", list(entry.shape), f"{dimensions} dimensions")
        return entry.shape

    def require(self, part: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Raise unless a part has this shape and one of these dtypes."""
        found = self.shape(part, *dtypes, dimensions=len(shape))
        if found != shape:
            allowed = f"{list(shape)}, as its settings and the other tensors of the matrix say"
            raise self._error(part, "shape", list(found), allowed)

    def array(self, part: str) -> NDArray[Any]:
        """Return a part as it is stored; maps its file."""
        entry = self.entries[part]
        return self.checkpoint.stored(entry.name).view(STORED[entry.dtype]).reshape(entry.shape)

    def floats(self, part: str, index: Any = ...) -> NDArray[Any]:
        """Return a part of floats at an index: float16 and float32 as stored, bfloat16 widened."""
        numbers = self.array(part)[index]
        return widened(numbers) if self.entries[part].dtype == "BF16" else numbers

    def of_inputs(self, part: str, count: int) -> IntArray:
        """Return the group of each input; raises if one is not below `count`."""
        groups: IntArray = self.array(part).astype(np.int64)
        if len(groups) and not 0 <= groups.min() <= groups.max() < count:
            raise self._error(part, "range", f"{groups.min()} to {groups.max()}", f"groups from 0 to {count - 1}")
        return groups

    def error(self, found: str, allowed: str) -> CheckpointError:
        """Return the error for a matrix whose parts do not fit together."""
        return CheckpointError(f"{self.checkpoint.name}: matrix {self.stem!r}", found, allowed)

    def _error(self, part: str, what: str, found: object, allowed: str) -> CheckpointError:
        return CheckpointError(f"{self.checkpoint.name}: tensor {self.entries[part].name!r}: {what}", found, allowed)


class Method(Protocol):
    """A way to quantise the matrices of a model, with the settings of one folder."""

    @property
    def name(self) -> str:
        """Its name and bits for users, such as "GPTQ, 4 bits"."""
        ...

    @property
    def marker(self) -> str:
        """The part that every quantised matrix has, and that no other matrix has."""
        ...

    @property
    def sides(self) -> frozenset[str]:
        """The other parts that a quantised matrix may have, including unused ones."""
        ...

    @property
    def unconverted(self) -> tuple[str, ...]:
        """The modules that are not quantised, according to the settings."""
        ...

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape `[out, in]` of a matrix, after checking its parts against each other. Reads no tensor."""
        ...

    def codes(self, parts: MatrixParts, rows: slice) -> NDArray[Any]:
        """Return the codes of rows of a matrix, `[rows, in]`."""
        ...

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales and zero points of rows of a matrix."""
        ...


@dataclass(frozen=True, slots=True)
class Groups:
    """The scales and zero points of rows, `[rows, groups]`; a single row applies to all.

    Scales are float32 or float16. `inputs` is the group of each input, or the size of a group, 0 for all inputs.
    `values`: the possible codes, or the float that each code stands for. `small`: the scales of e2m1 in 8 bits, which
    are e4m3 if there is a factor, and e8m0 else.
    """

    scales: NDArray[Any]
    zeros: NDArray[Any] | int
    inputs: IntArray | int
    values: range | FloatArray
    small: tuple[ByteArray, np.float32 | None] | None = None

    def scaled(self, codes: NDArray[Any]) -> FloatArray:
        """Return rows of (code - zero point) × scale."""
        numbers: FloatArray = codes.astype(np.float32) if isinstance(self.values, range) else self.values[codes]
        if not isinstance(self.zeros, int) or self.zeros:
            zeros = self.zeros if isinstance(self.zeros, int) else self._spread(self.zeros, codes.shape[1])
            numbers -= zeros
        with np.errstate(over="ignore", invalid="ignore"):  # scales that are not finite show in the weights
            numbers *= self._spread(self.scales, codes.shape[1])
        return numbers

    def of_runs(self, num_inputs: int, length: int) -> IntArray | None:
        """Return the group of each run of `length` inputs; None if a run has several groups."""
        starts = np.arange(0, num_inputs, length)
        if isinstance(self.inputs, int):
            return None if self.inputs % length else starts // (self.inputs or num_inputs)
        runs = self.inputs[starts]
        return runs if np.array_equal(np.repeat(runs, length)[:num_inputs], self.inputs) else None

    def _spread(self, of_groups: NDArray[Any], num_inputs: int) -> FloatArray:
        """Return the value of each input's group."""
        numbers: FloatArray = of_groups.astype(np.float32, copy=False)
        if not isinstance(self.inputs, int):
            return numbers[:, self.inputs]
        return np.repeat(numbers, self.inputs, axis=1)[:, :num_inputs] if self.inputs else numbers


def refusal(config: ConfigFile, method: str) -> ModelError:
    """Return the error for a method that quire does not read."""
    return ModelError(
        config.where, f"{config.where}: weights quantised by {method:.80}, which quire does not read. {ADVICE}"
    )


def optional_texts(config: ConfigFile, field: str) -> tuple[str, ...]:
    """Return a list of strings; empty if the field is missing or null."""
    return config.texts(field) if config.is_set(field) else ()


def group_size(config: ConfigFile) -> int:
    """Return the number of inputs that share a scale; 0 for all (-1 in the settings)."""
    size = config.size("group_size", 128, low=-1)
    if size == 0:
        raise config.error("group_size", "an integer from 1, or -1 for one group")
    return max(size, 0)


def num_groups(size: int, group: int) -> int:
    """Return the number of groups of `group` for `size` inputs; one if `group` is 0."""
    return -(-size // group) if group else 1


def unpacked(words: NDArray[np.int32], bits: int) -> ByteArray:
    """Return the codes of 4 or 8 bits in words, along the last dimension.

    >>> unpacked(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    data: ByteArray = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    codes = np.empty((*data.shape[:-1], 2 * data.shape[-1]), np.uint8)
    codes[..., 0::2], codes[..., 1::2] = data & 15, data >> 4
    return codes


def unpacked_columns(
    words: NDArray[np.int32], columns: slice, bits: int, order: tuple[int, ...] = IN_ORDER
) -> ByteArray:
    """Return columns of codes that are packed along columns; `order`: the index of each of eight columns in a word."""
    per_word = 32 // bits
    first = columns.start // per_word
    codes = unpacked(words[:, first : -(-columns.stop // per_word)], bits)
    if order != IN_ORDER:
        codes = codes.reshape(len(codes), -1, per_word).take(order, axis=2).reshape(codes.shape)
    return codes[:, columns.start - first * per_word : columns.stop - first * per_word]
