"""How long a model stays loaded after its last request: reads the setting.

>>> keep_alive_s("5m"), keep_alive_s("1h30m"), keep_alive_s(10), keep_alive_s("0"), keep_alive_s("never")
(300.0, 5400.0, 10.0, 0.0, inf)
"""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import Final

ALLOWED: Final = 'seconds, or a time such as "90s", "5m" or "1h30m"; 0: unload at once; negative or "never": forever'
UNITS: Final = MappingProxyType({"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0})
PART: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|µs|ms|s|m|h)", re.ASCII)
TIME: Final = re.compile(rf"(?:{PART.pattern})+", re.ASCII)
NUMBER: Final = re.compile(r"\d{1,12}(?:\.\d{1,9})?", re.ASCII)
FOREVER_S: Final = 1e9
"""A longer time, thirty years, counts as forever."""


def keep_alive_s(value: object) -> float:
    """Return a time in seconds, `math.inf` for a negative or endless one; raises ValueError if it is not a time."""
    seconds = None
    is_nan = isinstance(value, float) and math.isnan(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and not is_nan:
        seconds = float(value) if abs(value) < FOREVER_S else math.inf
    elif isinstance(value, str):
        seconds = _read(value.strip().lower())
    if seconds is None:
        raise ValueError(ALLOWED)
    return math.inf if seconds < 0 or seconds > FOREVER_S else seconds


def _read(text: str) -> float | None:
    if text == "never":
        return math.inf
    sign = -1.0 if text.startswith("-") else 1.0
    text = text.removeprefix("-")
    if NUMBER.fullmatch(text):
        return sign * float(text)
    if len(text) > 64 or not TIME.fullmatch(text):
        return None
    return sign * sum(float(number) * UNITS[unit] for number, unit in PART.findall(text))
