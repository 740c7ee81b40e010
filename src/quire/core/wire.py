"""A compact binary form for the values that cross the seam: fixed-width columns, length-prefixed, little endian.

Not pickle (which runs code) and not JSON (a plan is columns of integers). Fields are read in the order in which they
were written, and every length is checked before it is used.
"""

from __future__ import annotations

import struct
import sys
from array import array
from typing import TypeVar

from quire.core.errors import StepLogError

_T = TypeVar("_T", int, float)
_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")


class WireWriter:
    """Collects fields into bytes.

    >>> writer = WireWriter()
    >>> writer.integer(7); writer.text("a"); writer.column(array("i", [1, 2]))
    >>> reader = WireReader(writer.to_bytes())
    >>> reader.integer(), reader.text(), reader.column().tolist()
    (7, 'a', [1, 2])
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def integer(self, value: int) -> None:
        """Write a signed 64-bit integer."""
        self._parts.append(_INT.pack(value))

    def number(self, value: float) -> None:
        """Write a double."""
        self._parts.append(_FLOAT.pack(value))

    def raw(self, value: bytes) -> None:
        """Write bytes with their length."""
        self._parts.append(_INT.pack(len(value)))
        self._parts.append(value)

    def text(self, value: str) -> None:
        """Write a string; lone surrogates survive the round trip."""
        self.raw(value.encode("utf-8", "surrogatepass"))

    def column(self, values: array[int]) -> None:
        """Write a column of 32-bit integers."""
        self.raw(_little_endian(values).tobytes())

    def numbers(self, values: array[float]) -> None:
        """Write a column of doubles."""
        self.raw(_little_endian(values).tobytes())

    def to_bytes(self) -> bytes:
        """Return what was written."""
        return b"".join(self._parts)


class WireReader:
    """Reads fields in the order in which a `WireWriter` wrote them; raises `StepLogError` where bytes are missing."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _pass(self, size: int) -> int:
        """Return where the next bytes begin, and go on behind them."""
        start, end = self._at, self._at + size
        if size < 0 or end > len(self._data):
            raise StepLogError(f"the record ends after {len(self._data)} bytes, but {end} are needed")
        self._at = end
        return start

    def integer(self) -> int:
        """Read an integer."""
        value: int = _INT.unpack_from(self._data, self._pass(8))[0]
        return value

    def number(self) -> float:
        """Read a double."""
        value: float = _FLOAT.unpack_from(self._data, self._pass(8))[0]
        return value

    def raw(self) -> bytes:
        """Read bytes."""
        start = self._pass(self.integer())
        return self._data[start : self._at]

    def text(self) -> str:
        """Read a string."""
        try:
            return self.raw().decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise StepLogError(f"a string is not valid UTF-8: {error}") from error

    def column(self, length: int | None = None) -> array[int]:
        """Read a column of 32-bit integers, of exactly this length if one is given."""
        data = self.raw()
        if len(data) % 4 or length not in (None, len(data) // 4):
            expected = "a multiple of 4" if length is None else f"{4 * length}"
            raise StepLogError(f"a column of 32-bit integers has {len(data)} bytes; expected: {expected}")
        values = array("i")
        values.frombytes(data)
        return _little_endian(values)

    def numbers(self) -> array[float]:
        """Read a column of doubles."""
        data = self.raw()
        if len(data) % 8:
            raise StepLogError(f"a column of doubles has {len(data)} bytes; expected: a multiple of 8")
        values = array("d")
        values.frombytes(data)
        return _little_endian(values)

    def finish(self) -> None:
        """Raise `StepLogError` unless everything was read."""
        if self._at != len(self._data):
            raise StepLogError(f"{len(self._data) - self._at} bytes are left over at the end of a record")


def _little_endian(values: array[_T]) -> array[_T]:
    if sys.byteorder == "little":
        return values
    swapped = values[:]
    swapped.byteswap()
    return swapped
