"""MXFP4: weights as e2m1, a float of a sign, 2 bits of exponent and 1 of mantissa; each 32 share a power of two.

    blocks [out, in / 32, 16]    two weights a byte, the lower four bits first
    scales [out, in / 32]        e8m0: 2^(n - 127), NaN for 255

Twice an e2m1 is an integer, so GGUF blocks with 5 bits hold the weights to the bit if their scales fit into float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.gguf.blocks import MXFP4_SCALES, TWICE_E2M1
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import Groups, MatrixParts, optional_texts

SIZE: Final = 32
HALF_E8M0: Final = np.where(np.arange(256) < 255, MXFP4_SCALES, np.float32(np.nan))


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Implements `Method`."""

    unconverted: tuple[str, ...]
    name: str = "mxfp4, 4 bits"
    marker: str = "blocks"
    sides: frozenset[str] = frozenset({"scales"})
    integers: range = range(-12, 13)

    @classmethod
    def read(cls, config: ConfigFile) -> Mxfp4:
        """Read the settings of a folder."""
        return cls(optional_texts(config, "modules_to_not_convert"))

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        out, num_groups, _ = parts.shape("blocks", "U8", dimensions=3)
        parts.require("blocks", (out, num_groups, SIZE // 2), "U8")
        parts.require("scales", (out, num_groups), "U8")
        return out, num_groups * SIZE

    def codes(self, parts: MatrixParts, rows: slice) -> NDArray[np.int8]:
        """Return twice the weights of rows of a matrix, before they are scaled.

        >>> TWICE_E2M1[[1, 7, 15]].tolist(), float(HALF_E8M0[127])
        ([1, 12, -12], 0.5)
        """
        data = parts.array("blocks")[rows]
        codes = np.empty((len(data), data.shape[1], SIZE), np.int8)
        codes[..., 0::2], codes[..., 1::2] = TWICE_E2M1[data & 15], TWICE_E2M1[data >> 4]
        return codes.reshape(len(data), -1)

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return half the scales of rows of a matrix."""
        return Groups(HALF_E8M0[parts.array("scales")[rows]], 0, SIZE)
