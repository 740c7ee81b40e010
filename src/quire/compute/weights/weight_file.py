"""WeightFile: the tensors of a model by the names of Hugging Face, whatever file they are in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from quire.compute.arrays import ByteArray, FloatArray, HalfArray

EVERYTHING: Final = slice(None)


class WeightEntry(Protocol):
    """What a file says of a tensor before it is read."""

    @property
    def dtype(self) -> str:
        """How its numbers are stored, such as F32, BF16 or Q4_K."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, rows first."""
        ...


class WeightFile(Protocol):
    """Tensors that can be asked for in two dtypes, read-only."""

    @property
    def name(self) -> str:
        """What errors call it."""
        ...

    @property
    def entries(self) -> Mapping[str, WeightEntry]:
        """All tensors by name."""
        ...

    def stored_name(self, name: str) -> str:
        """Return what the file calls a tensor, for errors; the file need not have it."""
        ...

    def require_floats(self, name: str) -> None:
        """Raise unless a tensor is of a dtype that can be asked for. Does not mutate."""
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
        """Return rows of a matrix of blocks as they are stored, `[out, bytes of a row]`."""
        ...

    def release(self) -> None:
        """Free the memory that mapped files take up; views stay valid and are read again when used."""
        ...
