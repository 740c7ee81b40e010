"""Memory sizes as text, such as "4GiB": parse them and format them."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from quire.core.errors import InvalidConfigError

UNITS: Final = MappingProxyType(
    {"": 1, "b": 1}
    | {
        letter.lower() + tail: 1 << shift
        for letter, shift in zip("KMGT", (10, 20, 30, 40), strict=True)
        for tail in ("", "ib")
    }
    | {letter.lower() + "b": 1000**power for power, letter in enumerate("KMGT", start=1)}
)
SIZE: Final = re.compile(r"\s*0*(\d{1,30}(?:\.\d+)?)\s*+([A-Za-z]*)\s*", re.ASCII)
MAX_BYTES: Final = 1 << 60


def parse_bytes(value: int | str, field: str = "size") -> int:
    """Return a number of bytes, from a number or from a text with a unit; K means KiB, M means MiB and so on.

    >>> parse_bytes("4GiB"), parse_bytes("1.5M"), parse_bytes("2 kB"), parse_bytes(512)
    (4294967296, 1572864, 2000, 512)
    """
    size = None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := SIZE.fullmatch(value)) and match[2].lower() in UNITS:
        number, unit = match[1], UNITS[match[2].lower()]
        if "." not in number:
            size = int(number) * unit
        elif match[2]:  # a fraction without a unit is a share of the memory, or lacks its unit
            size = int(float(number) * unit)
    if size is None or not 0 <= size <= MAX_BYTES:
        raise InvalidConfigError(field, value, "a number of bytes, or a size such as 512MiB or 4GiB")
    return size


def format_bytes(size: int) -> str:
    """Return a size as text, in a suitable unit.

    >>> format_bytes(512), format_bytes(3 << 20), format_bytes(5 << 28)
    ('512 B', '3.0 MiB', '1.25 GiB')
    """
    for unit, digits in (("GiB", 2), ("MiB", 1), ("KiB", 1)):
        bytes_per_unit = UNITS[unit.lower()]
        if size >= bytes_per_unit:
            return f"{size / bytes_per_unit:,.{digits}f} {unit}"
    return f"{size} B"
