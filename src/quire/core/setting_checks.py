"""The checks of settings that many modules have: each raises `InvalidConfigError`."""

from __future__ import annotations

import sys

from quire.core.errors import InvalidConfigError


def require_int(field: str, value: object, low: int, high: int) -> None:
    """Raise `InvalidConfigError` unless a setting is an integer within limits."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidConfigError(field, value, f"an integer from {low} to {high}")


def require_number(field: str, value: object, low: float, high: float) -> None:
    """Raise `InvalidConfigError` unless a setting is a finite number within limits."""
    largest = sys.float_info.max
    if isinstance(value, bool) or not isinstance(value, int | float) or not -largest <= value <= largest:
        raise InvalidConfigError(field, value, "a finite number")
    if not low <= value <= high:
        raise InvalidConfigError(field, value, f"a number from {low:g} to {high:g}")


def require_one_of(field: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise `InvalidConfigError` unless a setting is one of the names."""
    if value not in allowed:
        raise InvalidConfigError(field, value, f"one of {', '.join(allowed)}")
