"""A rolling restart: one engine after another, while their requests go on in the others.

    closed to new requests ──► 5 s for those that it has ──► the rest moves, a few at a time ──► restart ──► open again

A few at a time, because each has to be computed again, and the others have work of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from quire.core.clock import Clock
from quire.core.errors import ExecutionError
from quire.engine.records.stats import ModelState
from quire.engine.replicas.book import PartBook
from quire.engine.replicas.parts import Part
from quire.engine.replicas.replica import Replica

DRAIN_S: Final = 5.0
"""How long the requests of an engine may go on there; those left are moved."""
MOVED_AT_ONCE: Final = 8
LOOK_S: Final = 0.02


class Engines(Protocol):
    """What a set of engines does for it."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines."""
        ...

    @property
    def book(self) -> PartBook:
        """Where requests are."""
        ...

    def close_to_requests(self, replica: Replica) -> None:
        """Send an engine nothing new until `open_to_requests`; it goes on with what it has. Mutates."""
        ...

    def open_to_requests(self, replica: Replica) -> None:
        """An engine may get requests again. Mutates."""
        ...

    def move(self, replica: Replica, most: int) -> list[Part]:
        """Take at most this many parts from a healthy engine; return those that go on elsewhere instead. Mutates."""
        ...


async def roll(engines: Engines, clock: Clock, *, may_move: bool) -> None:
    """Restart the engines of a set; with `may_move` off, each waits until its requests have ended. Mutates."""
    for replica in engines.replicas:
        if not replica.is_ready:
            continue
        engines.close_to_requests(replica)
        try:
            await _restart(engines, replica, clock, may_move)
        finally:
            engines.open_to_requests(replica)


async def drain(engines: Engines, replica: Replica, clock: Clock, *, may_move: bool) -> None:
    """Wait until an engine that is closed to requests has none left; move those that take long. Mutates."""
    end_s = clock.now() + DRAIN_S
    while engines.book.num_at(replica) and replica.is_ready:
        others = [other for other in engines.replicas if other is not replica and other.is_ready]
        if not may_move or (clock.now() < end_s and others):
            await asyncio.sleep(LOOK_S)
            continue
        moved = engines.move(replica, MOVED_AT_ONCE)
        while others and not all(map(engines.book.has_started, moved)):
            await asyncio.sleep(LOOK_S)


async def _restart(engines: Engines, replica: Replica, clock: Clock, may_move: bool) -> None:
    epoch = replica.epoch
    await drain(engines, replica, clock, may_move=may_move)
    if replica.epoch == epoch:  # else it has died meanwhile, and was started again
        replica.recycle()
    while replica.epoch == epoch or not replica.is_ready:
        if replica.state in (ModelState.FAILED, ModelState.CLOSED):
            raise ExecutionError(f"replica {replica.index} has not come back: {replica.failure}")
        await asyncio.sleep(LOOK_S)
