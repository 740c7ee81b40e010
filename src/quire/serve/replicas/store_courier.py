"""StoreCourier, RelayCourier: copy blocks from one engine's store to another's. They implement `Courier`.

    ask    KeepPrompt to both engines ──► the source's blocks are on its disk; the target reports what it has
    move   store of the source ──► Landing at the target's machine ──► TakeBlocks ──► store of the target

This is `/cache/export` followed by `/cache/import`, with the same checks of every block. On one machine the server
copies from file to file. On a cluster, relays copy: the bytes go from one relay to the other through Ray's object
store, and never through the server.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

from quire.core.errors import ExecutionError
from quire.core.kept_block import FetchError, KeptBlock
from quire.engine.replicas.fetches import FAILED, Errand, StoredBlocks, StoringEngines
from quire.serve.bundles import Bundles
from quire.serve.errors import ApiError
from quire.serve.replicas.landing import LOST, Landed, Landing, fetch_errors, read_chain
from quire.serve.replicas.remote_engine import RemoteEngine
from quire.serve.run.cache_commands import CacheCommands

NOT_KEPT: Final = "not kept"
NO_ROOM: Final = "no room"


class BundleCourier(ABC):
    """Makes engines write and import blocks. Subclasses carry the bytes between them."""

    def __init__(self) -> None:
        self._num_errands = 0

    @abstractmethod
    def landed(self, errand: Errand, stored: StoredBlocks) -> AbstractAsyncContextManager[Landed]:
        """Copy blocks to the target's machine, for the time of a `with` block; raises `FetchError`."""

    async def ask(self, engines: StoringEngines, errand: Errand) -> StoredBlocks | None:
        """Make the source write the blocks to its disk; return None if the target has them all."""
        there = [errand.source.index, errand.target.index]
        with fetch_errors():
            jobs = self._jobs(engines)
            source, target = await jobs.keep_at(there, errand.tokens, errand.scope, wants_slots=True)
        if target.job.num_stored_tokens >= len(errand.tokens):
            return None
        if source.job.num_stored_tokens < len(errand.tokens):
            raise FetchError(NOT_KEPT)  # evicted meanwhile, or its disk has no room
        return StoredBlocks(source.engine.disk_store, target.engine.disk_store, source.job.slots)

    async def move(self, engines: StoringEngines, errand: Errand, stored: StoredBlocks) -> int:
        """Copy blocks, and make the target import them; return the number of bytes."""
        async with self.landed(errand, stored) as landed:

            async def some(first: int, end: int) -> tuple[KeptBlock, ...]:
                return landed.blocks[first:end]

            with fetch_errors():
                jobs, target = self._jobs(engines), [errand.target.index]
                (taken,) = await jobs.take(landed.path, len(landed.blocks), some, target)
        if taken.num_left_out:
            raise FetchError(NO_ROOM)
        return landed.num_bytes

    def _jobs(self, engines: StoringEngines) -> CacheCommands:
        self._num_errands += 1
        return CacheCommands(engines, f"fetch-{self._num_errands}")


class StoreCourier(BundleCourier):
    """Copies blocks between stores of this machine, in a thread."""

    def __init__(self) -> None:
        super().__init__()
        self._bundles = Bundles()

    @asynccontextmanager
    async def landed(self, errand: Errand, stored: StoredBlocks) -> AsyncGenerator[Landed, None]:
        """Copy blocks from file to file."""
        run, tokens, scope = self._bundles.run, errand.tokens.tobytes(), errand.scope
        store, count, vocab_size = Path(stored.target_store), len(stored.slots), _vocab_size(errand)
        pieces = read_chain(Path(stored.source_store), stored.slots, tokens, scope)
        try:
            async with self._bundles.opened(lambda: Landing(store, count, vocab_size)) as landing:
                yield await run(lambda: landing.take(pieces, scope))
        except ApiError as error:
            raise FetchError(FAILED) from error


class RelayCourier(BundleCourier):
    """Makes two engines' relays copy blocks from one machine to the other."""

    @asynccontextmanager
    async def landed(self, errand: Errand, stored: StoredBlocks) -> AsyncGenerator[Landed, None]:
        """Make one relay lend a bundle, and the other land it."""
        source, target = errand.source.connection, errand.target.connection
        if not isinstance(source, RemoteEngine) or not isinstance(target, RemoteEngine):
            raise FetchError(LOST)
        tokens, scope = errand.tokens.tobytes(), errand.scope
        number = self._num_errands
        with fetch_errors():
            lent = source.link.lend(stored.source_store, stored.slots, tokens, scope)
            store, count = stored.target_store, len(stored.slots)
            try:
                yield await target.link.land(number, lent, (store, count, _vocab_size(errand)), scope)
            finally:
                target.link.take_off(number)


def _vocab_size(errand: Errand) -> int:
    limits = errand.target.limits
    if limits is None:
        raise ExecutionError("the engine is not running")
    return limits.vocab_size
