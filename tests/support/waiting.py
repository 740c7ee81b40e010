"""Waiting for something to come to be so."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], bool], seconds: float = 300.0) -> None:
    """Wait until something is so; fails where it takes too long."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to be so"
        time.sleep(0.01)
