"""Rows times matrices, in two forms: `product`, and `TiledProduct`, which gives a row the same bits in any company.

Libraries pick a kernel by the number of rows, and another kernel adds in another order. So where bits must not depend
on the batch, rows go through in tiles of one size, padded with zeros: every product with a matrix is the same call.
What is left is the place of a row within its tile. `choose_tile` tries, before the first step, whether a row has the
same bits in every place, with every shape of matrix that the model has, and takes the largest tile that passes; a tile
of one row always does where the library is deterministic. Tiles are small against a batch, and each of them reads the
matrix anew: that is the price of the mode.

int8 matrices hold a scale for each output. They are made numbers of the rows' dtype on the way (exactly: 8 bits fit),
and the scale is multiplied in at the end, in float32.
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
"""Numbers of rows to try, by kind of device."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """What rows are multiplied with, or looked up in: `[out, in]`; of experts, one behind the other."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None  # [out], in the dtype of rows
    scales: torch.Tensor | None = None  # float32 [out], of int8 only

    def looked_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the matrix, int8 as float32. Does not mutate."""
        rows = self.weight[ids]
        return rows if self.scales is None else rows.to(torch.float32) * self.scales[ids, None]

    def of(self, expert: int) -> Matrix:
        """Return the matrix of an expert, a view of those of all: `[num_experts, out, in]`."""
        return Matrix(self.weight[expert], None, None if self.scales is None else self.scales[expert])


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
        """Return weight @ row + bias for each row, each tile a call of its own."""
        padded = functional.pad(rows, (0, 0, 0, -len(rows) % self.num_rows))
        return torch.cat([product(tile, matrix) for tile in padded.split(self.num_rows)])[: len(rows)]


def choose_tile(matrices: Iterable[Matrix], dtype: torch.dtype) -> TiledProduct:
    """Return the product with the largest tile in which a row's bits do not depend on its place. Does not mutate.

    One matrix of each shape is tried. Raises `InvalidConfigError` where no tile passes.
    """
    shapes = {(matrix.weight.shape, matrix.weight.dtype, matrix.bias is None): matrix for matrix in matrices}
    kind = next(iter(shapes.values())).weight.device.type
    for num_rows in TILES[kind]:
        if all(_is_same_in_every_place(matrix, num_rows, dtype) for matrix in shapes.values()):
            return TiledProduct(num_rows)
    allowed = f"False: a row's bits depend on its place in the matrix products of this machine ({kind}, {dtype})"
    raise InvalidConfigError("batch_invariant", True, allowed)


def keep_sums_whole() -> None:
    """Let no product on CUDA split its sums or round them on the way. Mutates torch's settings of this process."""
    # Of each pair the second says whether a sum may be split among several programs. torch can ask that of cuBLASLt
    # only: with cuBLAS, its default, every product in half precision would be an error.
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = (False, False)


def _is_same_in_every_place(matrix: Matrix, num_rows: int, dtype: torch.dtype) -> bool:
    """Return whether turned rows give turned results, to the bit."""
    device = matrix.weight.device
    random = torch.Generator().manual_seed(0)
    rows = torch.randn((num_rows, matrix.weight.shape[1]), generator=random)
    rows = rows.to(device, dtype if matrix.scales is not None else matrix.weight.dtype)
    expected = product(rows, matrix)
    return all(
        torch.equal(product(rows.roll(places, dims=0), matrix), expected.roll(places, dims=0))
        for places in range(num_rows)
    )
