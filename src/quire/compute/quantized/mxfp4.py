"""MXFP4: weights as e2m1, a float of a sign, 2 bits of exponent and 1 of mantissa; each 32 share a power of two.

    blocks [out, in / 32, 16]          two weights a byte, the lower four bits first
    scales [out, in / 32]              e8m0: 2^(n - 127), NaN for 255
    weight_packed [out, in / 2],       the same in compressed-tensors
    weight_scale [out, in / 32]

Twice an e2m1 is an integer: codes are twice the weights, and scales are halved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import Groups, MatrixParts, optional_texts
from quire.compute.weights.small_floats import HALF_E8M0, TWICE_E2M1, TWICE_VALUES

SIZE: Final = 32


def twice_e2m1(packed: ByteArray) -> NDArray[np.int8]:
    """Return twice the weights of rows, `[rows, in]`, from bytes of two weights each, before they are scaled.

    >>> twice_e2m1(np.array([[0x71, 0xF0]], np.uint8)).tolist(), float(HALF_E8M0[127])
    ([[1, 12, 0, -12]], 0.5)
    """
    data = packed.reshape(len(packed), -1)
    codes = np.empty((len(data), 2 * data.shape[1]), np.int8)
    codes[:, 0::2], codes[:, 1::2] = TWICE_E2M1[data & 15], TWICE_E2M1[data >> 4]
    return codes


def read(config: ConfigFile) -> Mxfp4:
    """Read the settings of a folder."""
    return Mxfp4(optional_texts(config, "modules_to_not_convert"))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Implements `Method`. `packed`: the part with the weights; `is_cut`: whether in blocks of 32; `scales`: a part."""

    unconverted: tuple[str, ...]
    name: str = "mxfp4, 4 bits"
    marker: str = "blocks"
    packed: str = "blocks"
    is_cut: bool = True
    scales: str = "scales"

    @property
    def sides(self) -> frozenset[str]:
        """The other parts, and the marker."""
        return frozenset({self.packed, self.scales, "weight_shape"})

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        out, num_groups = parts.shape(self.scales, "U8")
        size = (out, num_groups, SIZE // 2) if self.is_cut else (out, num_groups * SIZE // 2)
        parts.require(self.packed, size, "U8")
        return out, num_groups * SIZE

    def codes(self, parts: MatrixParts, rows: slice) -> NDArray[np.int8]:
        """Return twice the weights of rows of a matrix, before they are scaled."""
        data: NDArray[Any] = parts.array(self.packed)[rows]
        return twice_e2m1(data)

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return half the scales of rows of a matrix."""
        scales: ByteArray = parts.array(self.scales)[rows]
        return Groups(HALF_E8M0[scales], 0, SIZE, TWICE_VALUES, (scales, None))
