"""Quantised rows as blocks, if that changes no weight: an engine multiplies blocks directly.

    Q4_0    d(n - 8)     n of 4 bits    18 bytes for 32 weights
    Q5_0    d(n - 16)    n of 5 bits    22
    Q8_0    d n          n as int8      34
    MXFP4   2 d n        n as e2m1      17; 2 d as e8m0
    E4M3    d n          n as e4m3      132 bytes for 128 weights; no type of GGUF, and d is float32
    NVFP4   2 d s n      n as e2m1       22 bytes for 32 weights; two s as e4m3, and d is float32; not GGUF's blocks

A weight is (code - zero point) × scale. A matrix becomes blocks if the inputs of each block share a scale, if d can
represent each scale, and if n can represent all differences. Scales, zero points and groups show this, so no codes
need to be read.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray, IntArray
from quire.compute.quantized.matrix import Groups
from quire.compute.weights import small_floats
from quire.compute.weights.block_fields import (
    MXFP4_BYTES,
    NVFP4_BYTES,
    SIZE,
    are_mxfp4,
    are_nvfp4,
    five_bits,
    four_bits,
    mxfp4_blocks,
    nvfp4_blocks,
)
from quire.core.errors import InvariantError

HOLDS: Final = MappingProxyType({"Q4_0": range(-8, 8), "Q5_0": range(-16, 16), "Q8_0": range(-128, 128)})
"""The range of n in each type of integers, the smallest type first."""

E4M3: Final = "E4M3"
MXFP4: Final = "MXFP4"
NVFP4: Final = "NVFP4"
BLOCKS: Final = MappingProxyType(
    {
        "Q4_0": (SIZE, 18),
        "Q5_0": (SIZE, 22),
        "Q8_0": (SIZE, 34),
        E4M3: (128, 132),
        MXFP4: (SIZE, MXFP4_BYTES),
        NVFP4: (SIZE, NVFP4_BYTES),
    }
)
"""The weights and the bytes of a block."""


def exact_type(groups: Groups, num_inputs: int) -> str:
    """Return the smallest type whose blocks represent the weights of a matrix to the bit; empty if there is none.

    `groups`: of all rows.
    """
    values = groups.values
    if groups.small is not None:
        return _type_of_e2m1(*groups.small, num_inputs)
    size = SIZE if isinstance(values, range) else BLOCKS[E4M3][0]
    if not groups.scales.size or num_inputs % size or groups.of_runs(num_inputs, size) is None:
        return ""
    if not isinstance(values, range):
        return E4M3 if values is small_floats.E4M3 else ""
    least, most = values[0] - int(np.max(groups.zeros)), values[-1] - int(np.min(groups.zeros))
    kind = next((kind for kind, numbers in HOLDS.items() if least in numbers and most in numbers), "")
    return kind if kind and _are_float16(groups.scales) else ""


def _type_of_e2m1(scales: ByteArray, factor: np.float32 | None, num_inputs: int) -> str:
    if not scales.size or num_inputs % SIZE:
        return ""
    if factor is None:
        return MXFP4 if are_mxfp4(scales) else ""
    return NVFP4 if are_nvfp4(scales, factor) else ""


def blocks_of(kind: str, codes: NDArray[Any], groups: Groups) -> ByteArray:
    """Return rows of codes as blocks of a type that `exact_type` returned for their matrix, `[rows, bytes]`.

    >>> codes, groups = np.arange(32).reshape(1, 32) % 16, Groups(np.array([[0.5]], np.float32), 8, 0, range(16))
    >>> blocks_of("Q4_0", codes, groups)[0, :5].tolist()
    [0, 56, 0, 17, 34]
    """
    size, _ = BLOCKS[kind]
    if groups.small is not None:
        scales, factor = groups.small
        return mxfp4_blocks(codes, scales) if factor is None else nvfp4_blocks(codes, scales, factor)
    (num_rows, num_inputs), runs = codes.shape, groups.of_runs(codes.shape[1], size)
    if runs is None:
        raise InvariantError(f"{num_inputs} inputs in groups that {size} of them do not share")
    scales = np.empty((num_rows, len(runs), 1), "<f4" if kind == E4M3 else "<f2")
    with np.errstate(over="ignore"):  # the type was chosen for the scales of all rows: no scale changes here
        scales[:, :, 0] = groups.scales[:, runs]
    cut = np.ascontiguousarray(codes).reshape(num_rows, -1, size)  # codes of AWQ and GPTQ come transposed
    fields = [cut] if kind == E4M3 else _fields(kind, _numbers(kind, cut, groups, runs))
    return np.concatenate([scales.view(np.uint8), *fields], axis=2).reshape(num_rows, -1)


def row_bytes(kind: str, num_inputs: int) -> int:
    """Return the bytes of a row of blocks.

    >>> row_bytes("Q4_0", 64), row_bytes("E4M3", 256)
    (36, 264)
    """
    size, num_bytes = BLOCKS[kind]
    return num_inputs // size * num_bytes


def _numbers(kind: str, codes: NDArray[Any], groups: Groups, runs: IntArray) -> ByteArray:
    """Return n of each weight as a byte, from codes in blocks; bytes wrap around, and n fits into one."""
    zeros = np.int64(groups.zeros) if isinstance(groups.zeros, int) else groups.zeros[:, runs, None].astype(np.int64)
    return codes.astype(np.uint8) - (zeros + (0 if kind == "Q8_0" else HOLDS[kind][0])).astype(np.uint8)


def _fields(kind: str, n: ByteArray) -> list[ByteArray]:
    """Return the fields after the scale in each block."""
    if kind == "Q8_0":
        return [n]
    return [four_bits(n)] if kind == "Q4_0" else list(five_bits(n))


def _are_float16(scales: NDArray[Any]) -> bool:
    if scales.dtype == np.float16:
        return True
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    return np.array_equal(halves.astype(np.float32).view(np.uint32), np.ascontiguousarray(scales).view(np.uint32))
