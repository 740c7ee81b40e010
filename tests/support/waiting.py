"""Waiting for something to become true, in threads and in event loops; a test fails after the limit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

LIMIT_S = 300.0
Result = TypeVar("Result")


def wait_until(is_so: Callable[[], object], seconds: float = LIMIT_S) -> None:
    """Wait until something is so; fails where it takes too long."""
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it did not come to be so"
        time.sleep(0.01)


async def until(is_so: Callable[[], object]) -> None:
    """Wait until something is so, while the other tasks of the loop go on."""
    async with asyncio.timeout(LIMIT_S):
        while not is_so():
            await asyncio.sleep(0.001)


def run(test: Callable[[], Awaitable[Result]]) -> Result:
    """Run a test in an event loop of its own, within the limit."""

    async def limited() -> Result:
        async with asyncio.timeout(LIMIT_S):
            return await test()

    return asyncio.run(limited())
