"""JSON that is broken on purpose: values of other kinds and sizes, and bytes that are changed."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

NUMBERS: tuple[Any, ...] = (
    *(0, -1, 2**31 - 2, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**400, -(2**63)),
    *(1.5, 1e308, float("nan"), float("inf"), True, "32", [], {}),
)
ODD: tuple[Any, ...] = (*NUMBERS, None, "", "x", "\n\x1b", "a" * 5000, [0] * 5000, [[]], {"a": 1}, "\ud800")


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where values stand in JSON, of a long list or object the first few."""
    yield place
    keys = list(value)[:40] if isinstance(value, dict) else range(min(len(value), 6)) if isinstance(value, list) else ()
    for key in keys:
        yield from places(value[key], (*place, key))


def mutated_json(draw: random.Random, value: Any) -> Any:
    for _ in range(draw.randint(1, 4)):
        place = draw.choice(list(places(value)))
        odd = copy.deepcopy(draw.choice(ODD))
        if not place:
            continue
        holder = value
        for key in place[:-1]:
            holder = holder[key]
        if draw.random() < 0.2:
            del holder[place[-1]]
        else:
            holder[place[-1]] = odd
    return value


def mutated_bytes(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data))
    pieces = (b"", b"[", b"{", b"\x00", b"\xff", b"1e999", b"NaN", b"[" * 2000, data[max(0, at - 40) : at])
    return data[:at] + draw.choice(pieces) + data[at + draw.choice([0, 1, 30]) :]
