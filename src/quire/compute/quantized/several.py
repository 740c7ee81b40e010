"""Folders whose matrices are quantised in several ways, such as experts in NVFP4 and attention in fp8.

Settings name the modules of each way by patterns. quire does not match patterns: the dtypes and shapes of a matrix's
parts show in which of the ways it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from quire.compute.quantized.matrix import Groups, MatrixParts, Method
from quire.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Several:
    """Implements `Method` with several that have the same marker."""

    methods: tuple[Method, ...]

    @property
    def name(self) -> str:
        """The name of the first, and what follows it in those of the others."""
        first, *others = (method.name for method in self.methods)
        return " and ".join([first, *(name.partition(", ")[2] for name in others)])

    @property
    def marker(self) -> str:
        """The part that only quantised matrices have."""
        return self.methods[0].marker

    @property
    def sides(self) -> frozenset[str]:
        """The other parts in any of the methods."""
        return frozenset().union(*(method.sides for method in self.methods))

    @property
    def unconverted(self) -> tuple[str, ...]:
        """The modules that are not quantised."""
        return self.methods[0].unconverted

    def shape(self, parts: MatrixParts) -> tuple[int, int]:
        """Return the shape of a matrix, after checking its parts."""
        return self._of(parts).shape(parts)

    def codes(self, parts: MatrixParts, rows: slice) -> NDArray[Any]:
        """Return the codes of rows of a matrix."""
        return self._of(parts).codes(parts, rows)

    def groups(self, parts: MatrixParts, rows: slice) -> Groups:
        """Return the scales and zero points of rows of a matrix."""
        return self._of(parts).groups(parts, rows)

    def _of(self, parts: MatrixParts) -> Method:
        """Return the method whose parts a matrix has; raises if there is none, or several."""
        fitting = [method for method in self.methods if _fits(method, parts)]
        if len(fitting) != 1:
            found = "stored in none of the folder's formats" if not fitting else "stored so that several formats fit"
            raise parts.error(found, f"in one of {', '.join(method.name for method in self.methods)}")
        return fitting[0]


def one_of(methods: Iterable[Method]) -> Method:
    """Return a method for matrices of each of these; they must be several or one. Those named twice count once."""
    different = tuple(dict.fromkeys(methods))
    return different[0] if len(different) == 1 else Several(different)


def _fits(method: Method, parts: MatrixParts) -> bool:
    """Return whether a matrix has the parts of a method, and no others."""
    if parts.entries.keys() - method.sides - {method.marker}:
        return False
    try:
        method.shape(parts)
    except CheckpointError:
        return False
    return True
