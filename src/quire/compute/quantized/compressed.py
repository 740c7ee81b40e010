"""compressed-tensors: three of its formats.

    pack-quantized     weight_packed [out, in / codes per word], codes of 4 or 8 bits, each plus half their range;
                       weight_zero_point [out / codes per word, groups], packed along the outputs
    int-quantized      weight [out, in] as int8, weight_zero_point as int8 in the shape of the scales
    float-quantized    weight [out, in] as e4m3
    weight_scale       [1]; [out, 1]; [out, groups]; or one for each block: the strategies tensor, channel, group, block

quire does not round activations: their settings and scales are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import IntArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.fp8 import E4M3, block_sizes
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

PACKED: Final = "pack-quantized"
KINDS: Final = {PACKED: "int", "int-quantized": "int", "float-quantized": "float"}
STRATEGIES: Final = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of all quantised matrices. `block`: the outputs and inputs that share a scale; 0: all."""

    format: str
    bits: int
    symmetric: bool
    strategy: str
    block: tuple[int, int]

    @classmethod
    def read(cls, group: ConfigFile, layout: str) -> Scheme:
        """Read the settings of one group of matrices."""
        group.require("format", layout, None)
        weights = group.section("weights")
        kind, packed = KINDS[layout], layout == PACKED
        weights.require("type", *((kind, None) if kind == "int" else (kind,)))
        bits, symmetric = weights.size("num_bits", 8), weights.flag("symmetric", True)
        if bits not in ((4, 8) if packed else (8,)):
            raise weights.error("num_bits", "4 or 8" if packed else "8")
        strategy = weights.fields.get("strategy") or ("group" if weights.is_set("group_size") else "tensor")
        if not isinstance(strategy, str) or strategy not in (STRATEGIES[1:3] if packed else STRATEGIES):
            raise weights.error("strategy", f"one of {', '.join(STRATEGIES[1:3] if packed else STRATEGIES)}")
        if not symmetric and (kind == "float" or strategy == "block"):
            raise weights.error("symmetric", "true")
        blocks = {"tensor": (0, 0), "channel": (1, 0)}
        if strategy == "group":
            blocks["group"] = (1, group_size(weights))
        elif strategy == "block":
            blocks["block"] = block_sizes(weights, "block_structure")
        return cls(layout, bits, symmetric, strategy, blocks[strategy])


@dataclass(frozen=True, slots=True)
class Compressed:
    """Implements `Method`."""

    scheme: Scheme
    unconverted: tuple[str, ...]

    @classmethod
    def read(cls, config: ConfigFile) -> Compressed:
        """Read the settings of a folder."""
        layout = config.fields.get("format")
        if not isinstance(layout, str) or layout not in KINDS:
            raise refusal(config, f"compressed-tensors in the format {layout!r}")
        config.section("sparsity_config").require("format", "dense", None)
        if config.section("transform_config").fields:
            raise config.error("transform_config", "null: weights that were not rotated")
        groups = config.section("config_groups")
        schemes = {Scheme.read(groups.section(name), layout) for name in groups.fields}
        if len(schemes) != 1:
            raise config.error("config_groups", "one group, or several with the same weights")
        return cls(schemes.pop(), optional_texts(config, "ignore"))

    @property
    def name(self) -> str:
        """The method, its format and bits."""
        return f"compressed-tensors, {self.scheme.format}, {self.scheme.bits} bits"

    @property
    def marker(self) -> str:
        """The part that only quantised matrices have."""
        return "weight_packed" if self.scheme.format == PACKED else "weight_scale"

    @property
    def sides(self) -> frozenset[str]:
        """The other parts."""
        zeros = set() if self.scheme.symmetric else {"weight_zero_point"}
        stored = {"weight_scale", "weight_shape", "weight_g_idx"} if self.scheme.format == PACKED else {"weight"}
        return frozenset(zeros | stored | {"input_scale", "input_zero_point"})

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        scheme, per_word = self.scheme, 32 // self.scheme.bits
        if scheme.format == PACKED:
            out, words = parts.shape("weight_packed", "I32")
            num_inputs = words * per_word
            parts.require("weight_shape", (2,), "I64", "I32")
        else:
            out, num_inputs = parts.shape("weight", "I8" if KINDS[scheme.format] == "int" else "F8_E4M3")
        grid = num_groups(out, scheme.block[0]), num_groups(num_inputs, scheme.block[1])
        scales: tuple[int, ...] = grid
        if scheme.strategy == "tensor" and parts.entries["weight_scale"].shape in ((), (1,)):
            scales = parts.entries["weight_scale"].shape
        parts.require("weight_scale", scales, *FLOAT_DTYPES)
        if not scheme.symmetric and scheme.format == PACKED:
            parts.require("weight_zero_point", (-(-out // per_word), grid[1]), "I32")
        elif not scheme.symmetric:
            parts.require("weight_zero_point", scales, "I8")
        if "weight_g_idx" in parts.entries:
            parts.require("weight_g_idx", (num_inputs,), "I32")
        return out, num_inputs

    @property
    def integers(self) -> range:
        """The possible codes; empty for fp8."""
        if self.scheme.format == PACKED:
            return range(1 << self.scheme.bits)
        return range(-128, 128) if KINDS[self.scheme.format] == "int" else range(0)

    def codes(self, parts: MatrixParts, rows: slice) -> NDArray[Any]:
        """Return the codes of rows of a matrix."""
        if self.scheme.format == PACKED:
            return unpacked(parts.array("weight_packed")[rows], self.scheme.bits)
        return parts.array("weight")[rows]

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales and zero points of rows of a matrix."""
        scheme, height = self.scheme, self.scheme.block[0]
        blocks: Any = np.arange(rows.start, rows.stop) // height if height > 1 else rows if height else ...
        scales = parts.floats("weight_scale", blocks)
        inputs: IntArray | int = scheme.block[1]
        if "weight_g_idx" in parts.entries:
            inputs = parts.groups("weight_g_idx", scales.shape[1])
        zeros: NDArray[Any] | int = 1 << scheme.bits - 1 if scheme.format == PACKED else 0
        if not scheme.symmetric and scheme.format == PACKED:
            zeros = unpacked_columns(parts.array("weight_zero_point").T, rows, scheme.bits).T
        elif not scheme.symmetric:
            zeros = parts.array("weight_zero_point")[blocks]
        if not height:  # one scale, of any number of dimensions
            scales, zeros = scales.reshape(1, 1), np.reshape(zeros, (1, 1))
        return Groups(scales, zeros, inputs, None if self.integers else E4M3)
