"""NVFP4: weights as e2m1, as in MXFP4; each 16 share a scale in e4m3, and the matrix has one in float32.

    ModelOpt              weight [out, in / 2]           weight_scale [out, in / 16]    weight_scale_2, a factor
    compressed-tensors    weight_packed [out, in / 2]    weight_scale [out, in / 16]    weight_global_scale, a divisor

quire does not round activations: their scales are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray
from quire.compute.quantized.matrix import Groups, MatrixParts
from quire.compute.quantized.mxfp4 import twice_e2m1
from quire.compute.weights.small_floats import E4M3, TWICE_VALUES

SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class Nvfp4:
    """Implements `Method`. `packed`: the part with the weights; `whole`: the part with the scale of the matrix."""

    name: str
    packed: str
    whole: str
    is_divisor: bool
    unconverted: tuple[str, ...]
    marker: str = "weight_scale"

    @property
    def sides(self) -> frozenset[str]:
        """The other parts."""
        return frozenset({self.packed, self.whole, "input_scale", "input_global_scale", "weight_shape"})

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        out, num_groups = parts.shape("weight_scale", "F8_E4M3")
        parts.require(self.packed, (out, num_groups * SIZE // 2), "U8")
        is_scalar = self.whole in parts.entries and parts.entries[self.whole].shape == ()
        parts.require(self.whole, () if is_scalar else (1,), "F32")
        return out, num_groups * SIZE

    def codes(self, parts: MatrixParts, rows: slice) -> NDArray[np.int8]:
        """Return twice the weights of rows of a matrix, before they are scaled."""
        data: ByteArray = parts.array(self.packed)[rows]
        return twice_e2m1(data)

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return half the scales of rows of a matrix."""
        whole = np.float32(parts.array(self.whole).item())
        scales: ByteArray = parts.array("weight_scale")[rows]
        with np.errstate(all="ignore"):  # scales that are not finite show in the weights
            factor = np.float32(1) / whole if self.is_divisor else whole
            half = np.float32(factor * np.float32(0.5))
            return Groups(E4M3[scales] * half, 0, SIZE, TWICE_VALUES, (scales, half))
