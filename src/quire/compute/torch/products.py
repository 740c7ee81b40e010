"""Rows times matrices: `product`, and `TiledProduct`, which gives a row the same bits in any batch.

Libraries pick a kernel by the number of rows, and another kernel adds in another order. So if bits must not depend on
the batch, rows are multiplied in tiles of one size, padded with zeros: every product with a matrix is the same call.
Only the place of a row within its tile still varies. Before the first step, `choose_tile` tries whether a row has the
same bits in every place, with every shape of matrix in the model, and takes the largest tile that passes; a tile of one
row always passes if the library is deterministic. Tiles are small compared with a batch, and each reads the whole
matrix again: this mode costs that bandwidth.

A matrix can consist of codes (small integers or 8-bit floats) with scales:

    a scale for each output     int8, converted to the rows' dtype (exactly: 8 bits fit); the scale is multiplied in at
                                the end, in float32
    scales for its inputs       the blocks of a file (`quire.compute.torch.blocks`); a weight is widened in float32, and
                                rounded to the rows' dtype before it is multiplied

Here a matrix of codes is widened at each use. On a GPU kernels read the codes (`quire.compute.torch.fused_products`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch
from torch.nn import functional

from quire.core.errors import InvalidConfigError

TILES: Final = MappingProxyType({"cpu": (16, 1), "cuda": (128, 16)})
"""The tile sizes to try, in rows, by kind of device."""


Change: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
OUTER: Final = 256
"""Inputs that share an outer scale."""
HALF: Final = 16
"""The bytes that hold 32 codes of 4 bits: the low halves are the first 16 codes, the high halves the others."""
CODE_RANGE: Final = 128
"""No code of 8 bits is larger."""


class InputScales(NamedTuple):
    """The scales of some inputs of each output, `[out, groups]`: weight = scale × code + minimum.

    Scales are float16 or float32, or int8 to be multiplied by the float16 scale of `OUTER` inputs. Without minimums,
    codes of 4 bits count from -8. `outer_minimums` are negative: they multiply minimums that are subtracted.
    """

    scales: torch.Tensor
    minimums: torch.Tensor | None = None
    outer_scales: torch.Tensor | None = None  # [out, in / OUTER]
    outer_minimums: torch.Tensor | None = None

    def changed(self, change: Change) -> InputScales:
        """Return the same scales with each tensor changed."""
        return InputScales(*(None if each is None else change(each) for each in self))

    @classmethod
    def joined(cls, pieces: Iterable[InputScales]) -> InputScales:
        """Return the scales of matrices of one form as those of one matrix, outputs of the first one first."""
        columns = zip(*pieces, strict=True)
        return cls(*(None if each[0] is None else torch.cat(each) for each in columns))


class Bounds(NamedTuple):
    """The least and the highest input, then output, of some outputs of a matrix."""

    num_outputs: int
    numbers: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix to multiply rows by, or to look rows up in: `[out, in]`, of experts `[num_experts, out, in]`.

    Codes of 8 bits are int8 or e4m3. Codes of 4 bits are two to a byte, uint8 `[out, in / 2]`. `bounds`: of all outputs
    in turn, or of none; only a matrix without codes has some.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None  # [out], in the dtype of rows
    scales: torch.Tensor | None = None  # float32 [out]
    inputs: InputScales | None = None
    bounds: tuple[Bounds, ...] = ()

    @property
    def is_coded(self) -> bool:
        """Whether the weights are codes."""
        return self.weight.dtype in (torch.int8, torch.uint8, torch.float8_e4m3fn)

    @property
    def num_inputs(self) -> int:
        """The length of the rows that it multiplies."""
        return int(self.weight.shape[-1]) * (2 if self.weight.dtype is torch.uint8 else 1)

    def looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix, codes as float32. Does not mutate."""
        rows = self.weight[ids]
        if self.inputs is not None:
            return widened(rows, self.inputs.changed(lambda each: each[ids]))
        return rows if self.scales is None else rows.to(torch.float32) * self.scales[ids, None]

    def of(self, expert: int) -> Matrix:
        """Return the matrix of one expert, as a view of `[num_experts, out, in]`."""
        return self.changed(lambda each: each[expert])

    def changed(self, change: Change) -> Matrix:
        """Return the same matrix with each of its tensors changed. Does not mutate, but `change` may."""
        bias, scales = (None if each is None else change(each) for each in (self.bias, self.scales))
        inputs = None if self.inputs is None else self.inputs.changed(change)
        return Matrix(change(self.weight), bias, scales, inputs, self.bounds)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of the matrix."""
        yield from (each for each in (self.weight, self.bias, self.scales, *(self.inputs or ())) if each is not None)


def widened(codes: torch.Tensor, inputs: InputScales) -> torch.Tensor:
    """Return rows of codes as float32. Does not mutate."""
    if codes.dtype is torch.uint8:
        halves = codes.unflatten(-1, (-1, HALF))
        codes = torch.cat((halves & 15, halves >> 4), dim=-1).flatten(-2)
        codes = codes.to(torch.int8) - (8 if inputs.minimums is None else 0)

    def spread(of_groups: torch.Tensor, outer: torch.Tensor | None) -> torch.Tensor:
        each = of_groups.to(torch.float32)
        if outer is not None:
            each = each * outer.to(torch.float32).repeat_interleave(each.shape[-1] // outer.shape[-1], dim=-1)
        return each.repeat_interleave(codes.shape[-1] // each.shape[-1], dim=-1)

    numbers = codes.to(torch.float32) * spread(inputs.scales, inputs.outer_scales)
    return numbers if inputs.minimums is None else numbers + spread(inputs.minimums, inputs.outer_minimums)


Product: TypeAlias = Callable[[torch.Tensor, Matrix], torch.Tensor]


def product(rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return weight @ row + bias for each row: `[num_rows, in]` to `[num_rows, out]`, in the dtype of the rows."""
    if matrix.bounds:
        return torch.cat([_bounded(rows, part, numbers) for part, numbers in _pieces(matrix)], dim=-1)
    if matrix.inputs is not None:
        return functional.linear(rows, widened(matrix.weight, matrix.inputs).to(rows.dtype), matrix.bias)
    if matrix.scales is None:
        return functional.linear(rows, matrix.weight, matrix.bias)
    weight, scales = matrix.weight.to(rows.dtype), matrix.scales
    if rows.dtype is torch.float16:  # sums of codes exceed its range; to divide by a power of two changes no digit
        weight, scales = weight.div_(CODE_RANGE), scales * CODE_RANGE
    scaled = functional.linear(rows, weight).to(torch.float32) * scales
    return (scaled if matrix.bias is None else scaled + matrix.bias).to(rows.dtype)


def _pieces(matrix: Matrix) -> Iterator[tuple[Matrix, tuple[float, ...]]]:
    """Yield the outputs of a matrix that have the same bounds, as views, with these."""
    start = 0
    for num_outputs, numbers in matrix.bounds:
        rows = slice(start, start + num_outputs)
        yield Matrix(matrix.weight[rows], None if matrix.bias is None else matrix.bias[rows]), numbers
        start = rows.stop


def _bounded(rows: torch.Tensor, matrix: Matrix, numbers: tuple[float, ...]) -> torch.Tensor:
    low, high, lowest, highest = numbers
    return product(rows.clamp(low, high), matrix).clamp(lowest, highest)


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """`product` in tiles of a fixed number of rows."""

    num_rows: int

    def __call__(self, rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return weight @ row + bias for each row, with one call per tile."""
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % self.num_rows))
        return torch.cat([product(tile, matrix) for tile in padded.split(self.num_rows)])[: len(rows)]


def choose_tile(matrices: Iterable[Matrix], dtype: torch.dtype) -> TiledProduct:
    """Return the product with the largest tile in which a row's bits do not depend on its place. Does not mutate.

    Tries one matrix of each shape. Raises `InvalidConfigError` if no tile passes.
    """
    shapes = {(matrix.weight.shape, matrix.weight.dtype, matrix.bias is None): matrix for matrix in matrices}
    kind = next((matrix.weight.device.type for matrix in shapes.values()), "cpu")
    for num_rows in TILES[kind]:
        if all(_is_same_in_every_place(matrix, num_rows, dtype) for matrix in shapes.values()):
            return TiledProduct(num_rows)
    allowed = f"False: a row's bits depend on its place in the matrix products of this machine ({kind}, {dtype})"
    raise InvalidConfigError("batch_invariant", True, allowed)


def keep_sums_whole() -> None:
    """Forbid CUDA products to split their sums or to round partial sums. Mutates torch's settings of this process."""
    # The second value of each pair permits splitting a sum among several programs. torch can forbid that only for
    # cuBLASLt: with cuBLAS, its default, every product in half precision would be an error.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def _is_same_in_every_place(matrix: Matrix, num_rows: int, dtype: torch.dtype) -> bool:
    """Return whether rows in another order give the same results in that order, to the bit."""
    device = matrix.weight.device
    random = torch.Generator().manual_seed(0)
    rows = torch.randn((num_rows, matrix.num_inputs), generator=random)
    rows = rows.to(device, dtype if matrix.is_coded else matrix.weight.dtype)
    expected = product(rows, matrix)
    return all(
        torch.equal(product(rows.roll(places, dims=0), matrix), expected.roll(places, dims=0))
        for places in range(num_rows)
    )
