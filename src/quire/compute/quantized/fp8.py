"""fp8: weights as e4m3, a float of a sign, 4 bits of exponent and 3 of mantissa, with a scale for each block.

    weight [out, in]    weight_scale_inv [out / 128, in / 128], rounded up; in spite of its name, it multiplies
                        [] or [1] for the entire matrix, if weight_block_size is null (Ministral 3)

quire does not round activations to fp8: their scales are not used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import ByteArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import Groups, MatrixParts, num_groups, optional_texts
from quire.compute.weights.checkpoint import FLOAT_DTYPES
from quire.compute.weights.small_floats import E4M3


def block_sizes(config: ConfigFile, field: str) -> tuple[int, int]:
    """Return the outputs and inputs of a block."""
    sizes = config.fields.get(field)
    if not isinstance(sizes, list) or len(sizes) != 2 or not all(type(n) is int and 0 < n < 1 << 24 for n in sizes):
        raise config.error(field, "two integers from 1, such as [128, 128]")
    return sizes[0], sizes[1]


def read(config: ConfigFile) -> BlockFp8:
    """Read the settings of a folder."""
    config.require("fmt", "e4m3", "float8_e4m3fn", None)
    field = "weight_block_size"
    is_whole = field in config.fields and not config.is_set(field)
    block = (0, 0) if is_whole else block_sizes(config, field)
    return BlockFp8(block, optional_texts(config, "modules_to_not_convert") or optional_texts(config, "ignored_layers"))


@dataclass(frozen=True, slots=True)
class BlockFp8:
    """Implements `Method`. `block`: the outputs and inputs that share a scale; 0: all."""

    block: tuple[int, int]
    unconverted: tuple[str, ...]
    name: str = "fp8"
    marker: str = "weight_scale_inv"
    sides: frozenset[str] = frozenset({"weight", "input_scale", "activation_scale"})

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        out, num_inputs = parts.shape("weight", "F8_E4M3")
        grid: tuple[int, ...] = num_groups(out, self.block[0]), num_groups(num_inputs, self.block[1])
        if not self.block[0]:
            grid = () if parts.entries[self.marker].shape == () else (1,)
        parts.require("weight_scale_inv", grid, *FLOAT_DTYPES)
        return out, num_inputs

    def codes(self, parts: MatrixParts, rows: slice) -> ByteArray:
        """Return the bytes of rows of a matrix."""
        data: ByteArray = parts.array("weight")[rows]
        return data

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales of rows of a matrix."""
        if not self.block[0]:
            return Groups(parts.floats("weight_scale_inv").reshape(1, 1), 0, 0, E4M3)
        scales = parts.floats("weight_scale_inv", np.arange(rows.start, rows.stop) // self.block[0])
        return Groups(scales, 0, self.block[1], E4M3)
