"""A few of all combinations of values, in which those of every two axes, or of every three, still meet."""

from __future__ import annotations

import itertools
from typing import Any


def covering(*axes: tuple[Any, ...], strength: int = 2) -> list[tuple[Any, ...]]:
    """Choose combinations in which every `strength` values of different axes occur together; the same ones always."""
    rows = list(itertools.product(*(range(len(axis)) for axis in axes)))
    bits: dict[tuple[tuple[int, int], ...], int] = {}  # of values that must meet
    meetings = [
        sum(1 << bits.setdefault(each, len(bits)) for each in itertools.combinations(enumerate(row), strength))
        for row in rows
    ]
    missing = (1 << len(bits)) - 1
    chosen = []
    while missing:
        best = max(range(len(rows)), key=lambda index: (missing & meetings[index]).bit_count())
        missing &= ~meetings[best]
        chosen.append(tuple(axis[place] for axis, place in zip(axes, rows[best], strict=True)))
    return chosen
