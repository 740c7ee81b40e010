"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

NOTHING: Final = "−"
"""The cell of a figure that does not exist."""


def show_table(rows: Sequence[Sequence[str]], align: str = ">") -> str:
    """Return rows as text, labels to the left and cells to the right; `align` "<": cells to the left too.

    >>> print(show_table([["", "a"], ["requests", "12"]]))
               a
    requests  12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ["<", *align * (len(widths) - 1)]
    lines = [
        "  ".join(f"{cell:{each}{width}}" for cell, each, width in zip(row, aligns, widths, strict=True))
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)
