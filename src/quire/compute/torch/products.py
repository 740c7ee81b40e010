"""Rows times matrices: `product`, and `TiledProduct`, which gives a row the same bits in any batch.

Libraries pick a kernel by the number of rows, and another kernel adds in another order. So if bits must not depend on
the batch, rows are multiplied in tiles of one size, padded with zeros: every product with a matrix is the same call.
Only the place of a row within its tile still varies. Before the first step, `choose_tile` tries whether a row has the
same bits in every place, with every shape of matrix in the model, and takes the largest tile that passes; a tile of one
row always passes if the library is deterministic. Tiles are small compared with a batch, and each reads the whole
matrix again: that is the price of this mode.

int8 matrices have a scale for each output. They are converted to the rows' dtype (exactly: 8 bits fit), and the scale
is multiplied in at the end, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import torch
from torch.nn import functional

from quire.core.errors import InvalidConfigError

TILES: Final = MappingProxyType({"cpu": (16, 1), "cuda": (128, 16)})
"""The tile sizes to try, in rows, by kind of device."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix to multiply rows by, or to look rows up in: `[out, in]`; experts have one after another."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None  # [out], in the dtype of rows
    scales: torch.Tensor | None = None  # float32 [out], only for int8

    def looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix, int8 as float32. Does not mutate."""
        rows = self.weight[ids]
        return rows if self.scales is None else rows.to(torch.float32) * self.scales[ids, None]

    def of(self, expert: int) -> Matrix:
        """Return the matrix of an expert, a view of all of them, `[num_experts, out, in]`."""
        bias, scales = (None if each is None else each[expert] for each in (self.bias, self.scales))
        return Matrix(self.weight[expert], bias, scales)


Product: TypeAlias = Callable[[torch.Tensor, Matrix], torch.Tensor]


def product(rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """Return weight @ row + bias for each row: `[num_rows, in]` to `[num_rows, out]`, in the dtype of the rows."""
    if matrix.scales is None:
        return functional.linear(rows, matrix.weight, matrix.bias)
    scaled = functional.linear(rows, matrix.weight.to(rows.dtype)).to(torch.float32) * matrix.scales
    return (scaled if matrix.bias is None else scaled + matrix.bias).to(rows.dtype)


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
    kind = next(iter(shapes.values())).weight.device.type
    for num_rows in TILES[kind]:
        if all(_is_same_in_every_place(matrix, num_rows, dtype) for matrix in shapes.values()):
            return TiledProduct(num_rows)
    allowed = f"False: a row's bits depend on its place in the matrix products of this machine ({kind}, {dtype})"
    raise InvalidConfigError("batch_invariant", True, allowed)


def keep_sums_whole() -> None:
    """Forbid products on CUDA to split their sums or round them midway. Mutates torch's settings of this process."""
    # The second of each pair allows to split a sum among several programs. torch can forbid that only for cuBLASLt:
    # with cuBLAS, its default, every product in half precision would be an error.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def _is_same_in_every_place(matrix: Matrix, num_rows: int, dtype: torch.dtype) -> bool:
    """Return whether rows in another order give the same results in that order, to the bit."""
    device = matrix.weight.device
    random = torch.Generator().manual_seed(0)
    rows = torch.randn((num_rows, matrix.weight.shape[1]), generator=random)
    rows = rows.to(device, dtype if matrix.scales is not None else matrix.weight.dtype)
    expected = product(rows, matrix)
    return all(
        torch.equal(product(rows.roll(places, dims=0), matrix), expected.roll(places, dims=0))
        for places in range(num_rows)
    )
