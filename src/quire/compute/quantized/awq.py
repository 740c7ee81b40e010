"""AWQ in its gemm layout: codes of 4 bits packed along the outputs, `[in, out / 8]`, in its own order.

    scales [groups, out]    zero points [groups, out / 8], packed like the codes

The eight codes of a word, lowest bits first, belong to the columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from quire.compute.arrays import ByteArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import (
    Groups,
    MatrixParts,
    group_size,
    num_groups,
    optional_texts,
    refusal,
    unpacked_columns,
)
from quire.compute.weights.checkpoint import FLOAT_DTYPES

PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The index within the word of each of the columns 0 to 7."""


def read(config: ConfigFile) -> Awq:
    """Read the settings of a folder."""
    for field in ("version", "format", "checkpoint_format"):
        layout = config.fields.get(field) or "gemm"
        if not isinstance(layout, str) or layout.lower() != "gemm":
            raise refusal(config, f"AWQ in the layout {layout!r}")
    config = config.over({"bits": config.fields.get("w_bit", 4)})
    config = config.over({"group_size": config.fields.get("q_group_size", 128)})
    if config.size("bits") != 4:
        raise config.error("bits", "4")
    if not config.flag("zero_point", True):
        raise config.error("zero_point", "true")
    return Awq(group_size(config), optional_texts(config, "modules_to_not_convert"))


@dataclass(frozen=True, slots=True)
class Awq:
    """Implements `Method`."""

    group: int
    unconverted: tuple[str, ...]
    name: str = "AWQ, 4 bits"
    marker: str = "qweight"
    sides: frozenset[str] = frozenset({"qzeros", "scales"})

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        num_inputs, words = parts.shape("qweight", "I32")
        groups = num_groups(num_inputs, self.group)
        parts.require("qzeros", (groups, words), "I32")
        parts.require("scales", (groups, 8 * words), *FLOAT_DTYPES)
        return 8 * words, num_inputs

    def codes(self, parts: MatrixParts, rows: slice) -> ByteArray:
        """Return the codes of rows of a matrix."""
        return unpacked_columns(parts.array("qweight"), rows, 4, PLACES).T

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales and zero points of rows of a matrix."""
        zeros = unpacked_columns(parts.array("qzeros"), rows, 4, PLACES).T
        return Groups(parts.floats("scales", (slice(None), rows)).T, zeros, self.group, range(16))
