"""Marks the cases of a test that `make test` leaves out: it has every two values together, not every combination."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def left_out(place: int) -> Sequence[pytest.MarkDecorator]:
    """Return the marks of a case: it is left to `make test-long` unless its place is 0."""
    return [pytest.mark.long] if place else []
