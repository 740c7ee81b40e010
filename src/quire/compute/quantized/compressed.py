"""compressed-tensors: five of its formats, also several in one folder.

    pack-quantized     weight_packed [out, in / codes per word], codes of 4 or 8 bits, each plus half their range;
                       weight_zero_point [out / codes per word, groups], packed along the outputs
    int-quantized      weight [out, in] as int8, weight_zero_point as int8 in the shape of the scales
    float-quantized    weight [out, in] as e4m3
    weight_scale       [1]; [out, 1]; [out, groups]; or one for each block: the strategies tensor, channel, group, block
    nvfp4-pack-quantized, mxfp4-pack-quantized: nvfp4.py, mxfp4.py

quire does not round activations: their settings and scales are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import IntArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.fp8 import block_sizes
from quire.compute.quantized.matrix import (
    Groups,
    MatrixParts,
    Method,
    group_size,
    num_groups,
    optional_texts,
    refusal,
    unpacked,
    unpacked_columns,
)
from quire.compute.quantized.mxfp4 import Mxfp4
from quire.compute.quantized.nvfp4 import Nvfp4
from quire.compute.quantized.several import one_of
from quire.compute.weights.checkpoint import FLOAT_DTYPES
from quire.compute.weights.small_floats import E4M3

PACKED: Final = "pack-quantized"
FLOAT: Final = "float-quantized"
MOST_GROUPS: Final = 64
KINDS: Final = {PACKED: "int", "int-quantized": "int", FLOAT: "float"}
STRATEGIES: Final = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True)
class Scheme:
    """The format of quantised matrices. `block`: the outputs and inputs that share a scale; 0: all."""

    format: str
    bits: int
    symmetric: bool
    strategy: str
    block: tuple[int, int]

    @classmethod
    def read(cls, weights: ConfigFile, layout: str) -> Scheme:
        """Read the settings of one group of matrices."""
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


def read(config: ConfigFile) -> Method:
    """Read the settings of a folder."""
    config.section("sparsity_config").require("format", "dense", None)
    if config.section("transform_config").fields:
        raise config.error("transform_config", "null: weights that were not rotated")
    groups = config.section("config_groups")
    if not 0 < len(groups.fields) <= MOST_GROUPS:
        raise config.error("config_groups", f"1 to {MOST_GROUPS} groups")
    return one_of(_method(config, groups.section(name)) for name in groups.fields)


def _method(config: ConfigFile, group: ConfigFile) -> Method:
    """Return the method of one group of matrices."""
    layout = group.fields.get("format") or config.fields.get("format")
    weights, unconverted = group.section("weights"), optional_texts(config, "ignore")
    name = f"compressed-tensors, {layout}"
    match layout:
        case "nvfp4-pack-quantized":
            _require_fp4(weights, 16)
            return Nvfp4(name, "weight_packed", "weight_global_scale", True, unconverted)
        case "mxfp4-pack-quantized":
            _require_fp4(weights, 32)
            return Mxfp4(unconverted, name, "weight_scale", "weight_packed", False, "weight_scale")
        case str() if layout in KINDS:
            scheme = Scheme.read(weights, layout)
            return Compressed(f"{name}, {scheme.bits} bits", scheme, unconverted)
    raise refusal(config, f"compressed-tensors in the format {layout!r}")


def _require_fp4(weights: ConfigFile, size: int) -> None:
    """Raise unless the settings of matrices in e2m1 are the usual ones."""
    weights.require("type", "float")
    for field, usual in (("num_bits", 4), ("group_size", size)):
        if weights.size(field) != usual:
            raise weights.error(field, f"{usual}")


@dataclass(frozen=True, slots=True)
class Compressed:
    """Implements `Method` for the formats with one scale or zero point for each group, channel, block or matrix."""

    name: str
    scheme: Scheme
    unconverted: tuple[str, ...]
    marker: str = "weight_scale"

    @property
    def sides(self) -> frozenset[str]:
        """The other parts."""
        zeros = set() if self.scheme.symmetric else {"weight_zero_point"}
        stored = {"weight_packed", "weight_shape", "weight_g_idx"} if self.scheme.format == PACKED else {"weight"}
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
            inputs = parts.of_inputs("weight_g_idx", scales.shape[1])
        zeros: NDArray[Any] | int = 1 << scheme.bits - 1 if scheme.format == PACKED else 0
        if not scheme.symmetric and scheme.format == PACKED:
            zeros = unpacked_columns(parts.array("weight_zero_point").T, rows, scheme.bits).T
        elif not scheme.symmetric:
            zeros = parts.array("weight_zero_point")[blocks]
        if not height:  # one scale, of any number of dimensions
            scales, zeros = scales.reshape(1, 1), np.reshape(zeros, (1, 1))
        if KINDS[scheme.format] == "float":
            return Groups(scales, zeros, inputs, E4M3)
        return Groups(scales, zeros, inputs, range(1 << scheme.bits) if scheme.format == PACKED else range(-128, 128))
