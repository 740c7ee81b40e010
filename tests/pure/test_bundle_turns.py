"""Bundles take turns: a file is closed and the turn given back whatever ends a call, also while its file opens."""

from __future__ import annotations

import asyncio
from threading import Event

import pytest

from quire.serve.bundles import Bundles
from quire.serve.errors import ApiError


class File:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1


async def until_free(bundles: Bundles) -> None:
    for _ in range(5000):
        try:
            async with bundles.opened(File):
                return
        except ApiError:
            await asyncio.sleep(0.001)
    raise AssertionError("the turn is never given back")


def test_a_file_that_opens_for_nobody_is_closed_and_holds_the_turn_until_then() -> None:
    async def main() -> None:
        bundles, file, begun, may_open = Bundles(), File(), Event(), Event()

        def open_slowly() -> File:
            begun.set()
            may_open.wait(30.0)
            return file

        async def call() -> None:
            async with bundles.opened(open_slowly):
                raise AssertionError("it was cancelled before")

        task = asyncio.create_task(call())
        await asyncio.to_thread(begun.wait, 30.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(ApiError, match="another bundle"):
            async with bundles.opened(File):
                pass
        may_open.set()
        await until_free(bundles)
        assert file.num_closed == 1

    asyncio.run(main())


def test_the_turn_is_given_back_where_nothing_opens_and_where_the_call_fails() -> None:
    async def main() -> None:
        bundles, file = Bundles(), File()

        def refuse() -> File:
            raise OSError(5, "Input/output error")

        with pytest.raises(ApiError):
            async with bundles.opened(refuse):
                pass
        with pytest.raises(ZeroDivisionError):
            async with bundles.opened(lambda: file):
                raise ZeroDivisionError
        assert file.num_closed == 1
        async with bundles.opened(lambda: file):
            assert file.num_closed == 1
        assert file.num_closed == 2

    asyncio.run(main())
