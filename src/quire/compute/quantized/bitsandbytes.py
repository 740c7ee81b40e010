"""bitsandbytes: 4 bits, each code a number of a table, or 8 bits with a scale for each output.

    4 bits    weight [out × in / 2, 1]             two codes a byte, the upper four bits first
              weight.quant_map [16]                the number of each code: nf4 or fp4
              weight.absmax [out × in / 64]        a scale for each 64 weights
              weight.quant_state.bitsandbytes__nf4 JSON: the shape, and how many weights share a scale
    nested    weight.absmax as bytes               codes of the scales, less their mean
              weight.nested_quant_map [256]        the number of each
              weight.nested_absmax                 a scale for each 256 scales
    8 bits    weight [out, in] as int8, SCB [out]  a weight is code × SCB / 127

With 8 bits, bitsandbytes multiplies large activations apart; quire rounds no activations, and needs no such split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import ByteArray, FloatArray
from quire.compute.models.config_file import ConfigFile
from quire.compute.quantized.matrix import Groups, MatrixParts, Method, num_groups, optional_texts
from quire.core.model_files import parse_json_object

STATES: Final = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
MOST_STATE_BYTES: Final = 4096


def read(config: ConfigFile) -> Method:
    """Read the settings of a folder."""
    unconverted = optional_texts(config, "llm_int8_skip_modules")
    if config.flag("load_in_4bit", False):
        return FourBits(unconverted)
    if config.flag("load_in_8bit", False):
        return EightBits(unconverted)
    raise config.error("load_in_4bit", "true, or load_in_8bit is")


@dataclass(frozen=True, slots=True)
class State:
    """How a matrix of 4 bits is stored. `block`, `outer`: how many weights share a scale, and scales a scale of theirs.

    `mean`: of the scales.
    """

    shape: tuple[int, int]
    block: int
    outer: int
    mean: np.float32

    @classmethod
    def of(cls, parts: MatrixParts) -> State:
        """Read a matrix's own settings, the only tensor that is read to check the others."""
        part = next((each for each in STATES if each in parts.entries), STATES[0])
        (size,) = parts.shape(part, "U8", dimensions=1)
        where = f"{parts.checkpoint.name}: tensor '{parts.stem}.{part}'"
        if size > MOST_STATE_BYTES:
            raise parts.error(f"described in {size} bytes", f"in at most {MOST_STATE_BYTES}")
        fields = ConfigFile(where, parse_json_object(parts.array(part).tobytes(), where))
        shape = fields.fields.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 1 << 24 for n in shape):
            raise fields.error("shape", "two integers from 1")
        mean = fields.optional_number("nested_offset", low=-3e38, high=3e38) or 0.0
        return cls((shape[0], shape[1]), fields.size("blocksize"), fields.size("nested_blocksize", 1), np.float32(mean))


@dataclass(frozen=True, slots=True)
class FourBits:
    """Implements `Method`."""

    unconverted: tuple[str, ...]
    name: str = "bitsandbytes, 4 bits"
    marker: str = "weight.absmax"
    sides: frozenset[str] = frozenset(
        {"weight", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES}
    )

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        state = State.of(parts)
        out, num_inputs = state.shape
        if num_inputs % 2 or num_inputs % state.block:
            raise parts.error(f"{num_inputs} inputs", f"a multiple of 2 and of the {state.block} that share a scale")
        num_scales = out * (num_inputs // state.block)
        parts.require("weight", (out * num_inputs // 2, 1), "U8")
        parts.require("weight.quant_map", (16,), "F32")
        is_nested = "weight.nested_absmax" in parts.entries
        parts.require("weight.absmax", (num_scales,), "U8" if is_nested else "F32")
        if is_nested:
            parts.require("weight.nested_absmax", (num_groups(num_scales, state.outer),), "F32")
            parts.require("weight.nested_quant_map", (256,), "F32")
        return state.shape

    def codes(self, parts: MatrixParts, rows: slice) -> ByteArray:
        """Return the codes of rows of a matrix."""
        out, num_inputs = State.of(parts).shape
        data: ByteArray = parts.array("weight").reshape(out, num_inputs // 2)[rows]
        codes = np.empty((len(data), num_inputs), np.uint8)
        codes[:, 0::2], codes[:, 1::2] = data >> 4, data & 15
        return codes

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales of rows of a matrix."""
        state = State.of(parts)
        out, num_inputs = state.shape
        scales = parts.array("weight.absmax").reshape(out, num_inputs // state.block)[rows]
        if "weight.nested_absmax" in parts.entries:
            first = rows.start * scales.shape[1]
            outer = np.arange(first, first + scales.size) // state.outer
            with np.errstate(all="ignore"):  # scales that are not finite show in the weights
                numbers = parts.array("weight.nested_quant_map")[scales]
                numbers *= parts.array("weight.nested_absmax")[outer].reshape(scales.shape)
                scales = numbers + state.mean
        values: FloatArray = parts.array("weight.quant_map")
        return Groups(scales, 0, state.block, values)


@dataclass(frozen=True, slots=True)
class EightBits:
    """Implements `Method`."""

    unconverted: tuple[str, ...]
    name: str = "bitsandbytes, 8 bits"
    marker: str = "SCB"
    sides: frozenset[str] = frozenset({"weight", "weight_format"})

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        out, num_inputs = parts.shape("weight", "I8")
        parts.require("SCB", (out,), "F32")
        if "weight_format" in parts.entries:
            parts.require("weight_format", (), "U8")
        return out, num_inputs

    def codes(self, parts: MatrixParts, rows: slice) -> NDArray[np.int8]:
        """Return the codes of rows of a matrix; raises for the orders that old versions stored for their kernels."""
        if "weight_format" in parts.entries and parts.array("weight_format").any():
            raise parts.error("stored in the order of a kernel", "row by row, as versions since 0.45 store it")
        codes: NDArray[np.int8] = parts.array("weight")[rows]
        return codes

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales of rows of a matrix."""
        scales: FloatArray = parts.array("SCB")[rows, None] * np.float32(1 / 127)
        return Groups(scales, 0, 0, range(-128, 128))
