"""WeightFile: the tensors of a model by their names in Hugging Face, for any file format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from quire.compute.arrays import ByteArray, FloatArray, HalfArray

EVERYTHING: Final = slice(None)


class WeightEntry(Protocol):
    """The facts about a tensor that are known before it is read."""

    @property
    def dtype(self) -> str:
        """The format of its numbers, such as F32, BF16 or Q4_K."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, rows first."""
        ...


class WeightFile(Protocol):
    """Tensors that can be read in two dtypes; the arrays are read-only."""

    @property
    def name(self) -> str:
        """The name in errors."""
        ...

    @property
    def entries(self) -> Mapping[str, WeightEntry]:
        """All tensors by name."""
        ...

    def stored_name(self, name: str) -> str:
        """Return a tensor's name in the file, for errors; the file need not have it."""
        ...

    def require_floats(self, name: str) -> None:
        """Raise unless a tensor has a dtype that can be read. Does not mutate."""
        ...

    def tensor(self, name: str, rows: slice = EVERYTHING) -> FloatArray:
        """Return rows of a tensor as float32."""
        ...

    def bfloat16_bits(self, name: str, rows: slice = EVERYTHING) -> HalfArray:
        """Return rows of a tensor as bfloat16."""
        ...

    @property
    def block_types(self) -> Mapping[str, str]:
        """The block types of the matrices that are not stored as floats, by name."""
        ...

    def block_rows(self, name: str, rows: slice = EVERYTHING) -> ByteArray:
        """Return the stored rows of a matrix of blocks, `[out, bytes of a row]`."""
        ...

    def release(self) -> None:
        """Free the memory of mapped files; views stay valid and are read again when used."""
        ...
