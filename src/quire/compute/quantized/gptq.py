"""GPTQ: codes of 4 or 8 bits packed along the inputs, `[in / codes per word, out]`.

    scales [groups, out]    zero points [groups, out / codes per word], each stored minus one, except by `gptq_v2`
    g_idx [in]              the group of each input; with `desc_act`, in any order

GPTQ packers give every matrix a bias, of zeros if the model has none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import ByteArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import (
    Groups,
    MatrixParts,
    group_size,
    num_groups,
    optional_texts,
    refusal,
    unpacked,
    unpacked_columns,
)
from quire.compute.weights.checkpoint import FLOAT_DTYPES

FORMATS: Final = ("gptq", "gptq_v2")


def read(config: ConfigFile) -> Gptq:
    """Read the settings of a folder."""
    layout = config.fields.get("checkpoint_format") or "gptq"
    if layout not in FORMATS or config.flag("is_marlin_format", False):
        raise refusal(config, f"GPTQ in the layout {layout!r}" if layout not in FORMATS else "GPTQ for Marlin")
    bits = config.size("bits")
    if bits not in (4, 8):
        raise config.error("bits", "4 or 8")
    overrides = config.section("dynamic").fields
    if not all(name.startswith("-:") for name in overrides):
        raise config.error("dynamic", "only excluded modules, each with the prefix '-:'")
    return Gptq(
        bits,
        group_size(config),
        not config.flag("desc_act", False),
        layout == "gptq",
        optional_texts(config, "modules_to_not_convert"),
        f"GPTQ, {bits} bits",
    )


@dataclass(frozen=True, slots=True)
class Gptq:
    """Implements `Method`."""

    bits: int
    group: int
    ordered: bool
    zeros_less_one: bool
    unconverted: tuple[str, ...]
    name: str
    marker: str = "qweight"
    sides: frozenset[str] = frozenset({"qzeros", "scales", "g_idx"})

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        per_word = 32 // self.bits
        words, out = parts.shape("qweight", "I32")
        num_inputs = words * per_word
        groups = num_groups(num_inputs, self.group)
        parts.require("scales", (groups, out), *FLOAT_DTYPES)
        parts.require("qzeros", (groups, -(-out // per_word)), "I32")
        if "g_idx" in parts.entries or not self.ordered:
            parts.require("g_idx", (num_inputs,), "I32")
        return out, num_inputs

    def codes(self, parts: MatrixParts, rows: slice) -> ByteArray:
        """Return the codes of rows of a matrix."""
        return unpacked(parts.array("qweight")[:, rows].T, self.bits)

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales and zero points of rows of a matrix."""
        zeros = unpacked_columns(parts.array("qzeros"), rows, self.bits).T
        if self.zeros_less_one:
            zeros = (zeros + np.uint8(1)) & np.uint8((1 << self.bits) - 1)
        scales = parts.floats("scales", (slice(None), rows)).T
        inputs = parts.of_inputs("g_idx", scales.shape[1]) if "g_idx" in parts.entries else self.group
        return Groups(scales, zeros, inputs, range(1 << self.bits))
