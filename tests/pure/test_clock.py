"""Clocks: one that moves only when told to, and one that never goes back."""

from __future__ import annotations

import math

import pytest

from quire.core.clock import ManualClock, SystemClock
from quire.core.errors import InvalidValueError


def test_a_manual_clock_stands_until_it_is_moved() -> None:
    clock = ManualClock(10.0)
    assert [clock.now(), clock.now()] == [10.0, 10.0]
    clock.advance(0.25)
    clock.advance(0)
    assert clock.now() == 10.25


def test_a_manual_clock_starts_at_zero() -> None:
    assert ManualClock().now() == 0.0


@pytest.mark.parametrize("seconds", [-1e-9, -1, -math.inf, math.nan])
def test_a_manual_clock_does_not_go_back(seconds: float) -> None:
    clock = ManualClock(5.0)
    with pytest.raises(InvalidValueError, match=r"^seconds is .*; allowed: a number of seconds, 0 or more$"):
        clock.advance(seconds)
    assert clock.now() == 5.0


def test_the_system_clock_never_goes_back() -> None:
    clock = SystemClock()
    times = [clock.now() for _ in range(100)]
    assert times == sorted(times)
