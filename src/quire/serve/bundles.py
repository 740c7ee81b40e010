"""Bundles: cache blocks sent or received as an HTTP body. One at a time, in their own thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar

from quire.engine.text.tenant_pool import TenantPool
from quire.serve.management_errors import bundle_under_way, disk_cache_fails

Result = TypeVar("Result")


class Closeable(Protocol):
    """Open files."""

    def close(self) -> None:
        """Close them; may be called twice."""
        ...


File = TypeVar("File", bound=Closeable)


class Bundles:
    """Runs a server's bundles one at a time, with the thread that reads and writes their files."""

    def __init__(self) -> None:
        self._pool = TenantPool("quire-bundles", num_threads=1)
        self._is_busy = False
        self._closing: asyncio.Future[None] | None = None  # the event loop keeps no reference to it

    @asynccontextmanager
    async def opened(self, open_file: Callable[[], File]) -> AsyncGenerator[File, None]:
        """Open the files of a bundle for the time of a `with` block; raises `ApiError` while another bundle is open.

        The thread closes them after all work that it got earlier.
        """
        if self._is_busy:
            raise bundle_under_way()
        self._is_busy = True
        opening = asyncio.ensure_future(self.run(open_file))
        try:
            yield await asyncio.shield(opening)
        finally:
            self._closing = asyncio.ensure_future(self._close(opening))
            if opening.done():  # a disk that hangs must not hold up a request that has ended
                await asyncio.shield(self._closing)

    async def _close(self, opening: asyncio.Future[File]) -> None:
        """Close files, even if they open after the request has ended, and let the next bundle start. Mutates."""
        await asyncio.wait([opening])
        try:
            if opening.exception() is None:
                await self.run(opening.result().close)
        finally:
            self._is_busy = False

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return what `work` on files returns, off the event loop; raises `ApiError` if the disk fails."""
        try:
            return await self._pool.run("", work)
        except OSError as error:
            raise disk_cache_fails(error.strerror or type(error).__name__) from error
