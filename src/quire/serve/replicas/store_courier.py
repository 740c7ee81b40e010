"""StoreCourier: copies blocks between the stores of engines on this machine. Implements `Courier`.

    ask    KeepPrompt at both engines ──► what the source has is on its disk; what the target has need not come
    move   store of the source ──► RunningStore, checked ──► spool ──► TakeBlocks at the target ──► its store

It does what `/cache/export` and `/cache/import` do one after the other, so blocks are believed as little as theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from quire.compute.worker.store.closed import meta_of
from quire.compute.worker.store.running import RunningStore
from quire.compute.worker.store.slot_file import DamagedBlockError
from quire.compute.worker.store.spool import Intake, IntakeLimits, Spool
from quire.core.errors import ExecutionError, InvalidRequestError
from quire.engine.replicas.fetches import FAILED, Engines, Errand, FetchError, StoredBlocks
from quire.serve.bundles import Bundles
from quire.serve.errors import ApiError
from quire.serve.run.cache_jobs import CacheJobs

NOT_KEPT: Final = "not kept"
NO_ROOM: Final = "no room"
LOST: Final = "engine lost"
DAMAGED: Final = "damaged"


class StoreCourier:
    """Has engines write blocks and take some in, and carries those between their files in a thread."""

    def __init__(self) -> None:
        self._bundles = Bundles()
        self._num_errands = 0

    async def ask(self, engines: Engines, errand: Errand) -> StoredBlocks | None:
        """Have the source write the blocks to its disk; None: the target has them all."""
        there = [errand.source.index, errand.target.index]
        try:
            jobs = self._jobs(engines)
            source, target = await jobs.keep_at(there, errand.tokens, errand.scope, wants_slots=True)
        except ExecutionError as error:
            raise FetchError(LOST) from error
        if target.job.num_stored_tokens >= len(errand.tokens):
            return None
        if source.job.num_stored_tokens < len(errand.tokens):
            raise FetchError(NOT_KEPT)  # evicted meanwhile, or its disk has no room
        return StoredBlocks(source.engine.disk_store, target.engine.disk_store, source.job.slots)

    async def move(self, engines: Engines, errand: Errand, found: StoredBlocks) -> int:
        """Copy what was found, and have the target take it in; return how many bytes that were."""
        try:
            async with self._bundles.opened(lambda: _Copy(errand, found)) as copy:
                while await self._bundles.run(copy.next_piece):
                    pass
                jobs, target = self._jobs(engines), [errand.target.index]
                (taken,) = await jobs.take(copy.intake, errand.scope, self._bundles, target)
        except ExecutionError as error:
            raise FetchError(LOST) from error
        except (DamagedBlockError, InvalidRequestError, KeyError, ValueError) as error:
            raise FetchError(DAMAGED) from error
        except ApiError as error:
            raise FetchError(FAILED) from error
        if taken.num_left_out:
            raise FetchError(NO_ROOM)
        return copy.num_bytes

    def _jobs(self, engines: Engines) -> CacheJobs:
        self._num_errands += 1
        return CacheJobs(engines, f"fetch-{self._num_errands}")


class _Copy:
    """Blocks of one store on their way to another. Its methods are for a thread."""

    def __init__(self, errand: Errand, found: StoredBlocks) -> None:
        limits, path = errand.target.limits, Path(found.target_store)
        if limits is None:
            raise ExecutionError("the engine is not running")
        self._store = RunningStore(Path(found.source_store))
        self._spool: Spool | None = None
        self.num_bytes = 0
        try:
            blocks = self._store.chain(found.slots, errand.tokens.tobytes(), errand.scope)
            self._pieces = self._store.pieces(blocks)
            room = IntakeLimits(meta_of(path), len(found.slots), limits.vocab_size)
            self._spool = Spool(path.parent)
            self.intake = Intake(self._spool, room)
        except BaseException:
            self.close()
            raise

    def next_piece(self) -> bool:
        """Copy some more; False: that was all."""
        piece = next(self._pieces, b"")
        if not piece:
            self.intake.finish()
            return False
        self.intake.feed(piece)
        self.num_bytes += len(piece)
        return True

    def close(self) -> None:
        """Close and delete what was opened; may be called twice."""
        self._store.close()
        if self._spool is not None:
            self._spool.close()
