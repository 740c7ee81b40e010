"""Weights as codes: small integers with a scale for each 32 inputs. A plain reference implementation.

    int8_groups    weight = scale × code, with codes from -127 to 127; 34 bytes for 32 weights
    int4           weight = scale × code + minimum, with codes from 0 to 15; 20 bytes
    int8           a scale in float32 for each output instead, as the torch engine has it (torch/quantize.py)

Scales and minimums are float16. GGUF block types are kept as codes too, without rounding: `coded_row_bytes` returns
the size of a row in memory. docs/design/codes.md describes the arithmetic of products.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray

GROUP: Final = 32
INNER: Final = 256
MADE: Final = ("int8", "int8_groups", "int4")
"""The codes that are computed from floats when a model is loaded."""


@dataclass(frozen=True, slots=True)
class Coding:
    """The format of a matrix of codes; see native/include/quire/kernels.h. `group` 0: one float32 scale per output."""

    bits: int
    group: int = GROUP
    nested: bool = False
    minimums: bool = False
    scale_bytes: int = 2

    def row_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a row."""
        if not self.group:
            return num_inputs + 4
        padded = -(-num_inputs // GROUP) * GROUP
        groups, outer = padded // self.group, -(-padded // INNER)
        scales = groups + self.scale_bytes * outer if self.nested else self.scale_bytes * groups
        return padded * self.bits // 8 + scales * (2 if self.minimums else 1)


CODINGS: Final = MappingProxyType(
    {
        "int8": Coding(8, 0),
        "int8_groups": Coding(8),
        "int4": Coding(4, minimums=True),
        "Q4_0": Coding(4),
        "Q4_1": Coding(4, minimums=True),
        "Q5_0": Coding(5),
        "Q5_1": Coding(5, minimums=True),
        "Q8_0": Coding(8),
        "Q2_K": Coding(2, 16, nested=True, minimums=True),
        "Q3_K": Coding(3, 16, nested=True),
        "Q4_K": Coding(4, nested=True, minimums=True),
        "Q5_K": Coding(5, nested=True, minimums=True),
        "Q6_K": Coding(6, 16, nested=True),
        "Q6_K_wide": Coding(8, 16, nested=True),  # on a GPU, and so is the next
        "E4M3": Coding(8, 128, scale_bytes=4),
        "TERNARY": Coding(2, 16, nested=True),
        "IQ1": Coding(3, 16, nested=True),
        "IQ2": Coding(3, 16, nested=True),
        "IQ3_XXS": Coding(4, nested=True),
        "IQ3_S": Coding(4, nested=True),
        "IQ4_NL": Coding(4),
        "IQ4_XS": Coding(4, nested=True),
        "MXFP4": Coding(4, scale_bytes=1),
        "NVFP4": Coding(4, 16, nested=True, scale_bytes=4),
    }
)


@dataclass(frozen=True, slots=True)
class Codes:
    """A matrix as codes `[out, in]`, its scales and minimums `[out, groups]`."""

    codes: NDArray[np.int8]
    scales: FloatArray
    minimums: FloatArray | None = None

    def rows(self, ids: NDArray[np.int64] | slice = slice(None)) -> FloatArray:
        """Return rows of the matrix as float32."""
        codes = self.codes[ids]
        found = codes * _spread(self.scales[ids], codes.shape[1])
        return found if self.minimums is None else found + _spread(self.minimums[ids], codes.shape[1])


def _spread(of_groups: FloatArray, num_inputs: int) -> FloatArray:
    return np.repeat(of_groups, GROUP, axis=1)[:, :num_inputs]


def coded(numbers: FloatArray, kind: str) -> Codes:
    """Return a matrix as codes: int8_groups or int4. A group with NaN or infinity has NaN as its scale.

    >>> numbers = np.array([[127.0, -63.6, 0.0]], np.float32)
    >>> coded(numbers, "int8_groups").codes.tolist(), coded(numbers, "int4").codes.tolist()
    ([[127, -64, 0]], [[15, 0, 5]])
    """
    out, num_inputs = numbers.shape
    groups = -(-num_inputs // GROUP)
    # The padding of the last group must not widen its range.
    padded = np.pad(numbers, ((0, 0), (0, groups * GROUP - num_inputs)), mode="edge").reshape(out, groups, GROUP)
    usable = np.isfinite(padded).all(axis=2, keepdims=True)
    padded = np.where(usable, padded, np.float32(0))
    lowest, highest = padded.min(axis=2, keepdims=True), padded.max(axis=2, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        if kind == "int4":
            minimums = lowest.astype(np.float16).astype(np.float32)
            scales = _nearest(np.maximum(np.float32(0), highest - minimums) / np.float32(15))
        else:
            minimums = np.zeros_like(lowest)
            scales = _not_below(np.maximum(-lowest, highest) / np.float32(127))
        factors = np.where(scales > 0, np.float32(1) / scales, np.float32(0)).astype(np.float32)
        codes = np.rint((padded - minimums) * factors)
    codes = np.clip(np.nan_to_num(codes), *((0, 15) if kind == "int4" else (-127, 127))).astype(np.int8)
    usable &= np.isfinite(scales) & np.isfinite(minimums)  # or too large for float16
    scales, minimums = (np.where(usable, found, np.float32(np.nan))[:, :, 0] for found in (scales, minimums))
    return Codes(codes.reshape(out, -1)[:, :num_inputs].copy(), scales, minimums if CODINGS[kind].minimums else None)


def _nearest(scales: FloatArray) -> FloatArray:
    return scales.astype(np.float16).astype(np.float32)


def _not_below(scales: FloatArray) -> FloatArray:
    """Return each scale rounded up to float16, so that the largest code times its scale reaches the largest number."""
    halves = scales.astype(np.float16)
    above = np.nextafter(halves, np.float16(np.inf))
    return np.where(halves.astype(np.float32) < scales, above, halves).astype(np.float32)


def coded_row_bytes(kind: str, num_inputs: int) -> int:
    """Return the bytes of a row in memory, for codes in `MADE` or a GGUF type: F16, or one of blocks.

    >>> coded_row_bytes("int8_groups", 64), coded_row_bytes("Q4_K", 256)
    (68, 148)
    """
    return 2 * num_inputs if kind == "F16" else CODINGS[kind].row_bytes(num_inputs)


def in_groups(weights: str) -> str:
    """Return the CPU's kind of codes for a `weights` setting.

    >>> in_groups("int8"), in_groups("auto")
    ('int8_groups', 'auto')
    """
    return "int8_groups" if weights == "int8" else weights
