"""FusedProduct: a product whose kernels read codes, so that a matrix of codes is not widened whenever it is used.

Other matrices use the library's product. With `batch_invariant` all rows use one kernel shape, in which a row's bits do
not depend on other rows; without it, few rows use a smaller shape. For many rows, int8 is converted for the library's
product, which saves more time than the conversion takes. Codes with scales for inputs are never converted: the result
would take several times their memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from quire.compute.torch.kernels.grouped_product import CODED_FEW, CODED_MANY, coded_product
from quire.compute.torch.products import Matrix, Product, choose_tile, product

MOST_ROWS: Final = 512
"""The most rows that a kernel multiplies by int8: estimated, not measured."""


class FusedProduct:
    """Triton kernels for codes, another product for the rest; implements `Product`."""

    def __init__(self, other: Product, *, batch_invariant: bool) -> None:
        self._other = other
        self._batch_invariant = batch_invariant

    @classmethod
    def of(cls, matrices: Iterable[Matrix], dtype: torch.dtype, *, batch_invariant: bool) -> FusedProduct:
        """Return a product for these matrices; raises `InvalidConfigError` if the library has no tile for the mode."""
        plain = [matrix for matrix in matrices if not matrix.is_coded]
        other = choose_tile(plain, dtype) if batch_invariant else product
        return cls(other, batch_invariant=batch_invariant)

    def __call__(self, rows: torch.Tensor, matrix: Matrix) -> torch.Tensor:
        """Return weight @ row + bias for each row."""
        if not matrix.is_coded:
            return self._other(rows, matrix)
        if self._batch_invariant:
            return coded_product(rows, matrix, CODED_MANY)
        if len(rows) > MOST_ROWS and matrix.inputs is None:
            return self._other(rows, matrix)
        return coded_product(rows, matrix, CODED_FEW if len(rows) <= CODED_FEW.rows else CODED_MANY)
