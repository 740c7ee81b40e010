"""A rolling restart: engines restart one after another, and their requests continue in the others.

    closed to new requests ──► 5 s for its own requests ──► the rest moves, a few at a time ──► restart ──► open again

Requests move a few at a time, because another engine has to compute the tokens of each again, besides its own work.
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
"""Seconds that the requests of an engine get to end there; then the rest moves."""
MOVED_AT_ONCE: Final = 8
LOOK_S: Final = 0.02


class RestartableEngines(Protocol):
    """The part of a set of engines that a rolling restart uses."""

    @property
    def replicas(self) -> Sequence[Replica]:
        """The engines."""
        ...

    @property
    def book(self) -> PartBook:
        """The book of the requests and their engines."""
        ...

    def close_to_requests(self, replica: Replica) -> None:
        """Send an engine no new requests until `open_to_requests`; its own requests go on. Mutates."""
        ...

    def open_to_requests(self, replica: Replica) -> None:
        """Allow new requests in an engine again. Mutates."""
        ...

    def move(self, replica: Replica, most: int) -> list[Part]:
        """Take at most this many parts from a healthy engine; return the parts that replace them. Mutates."""
        ...


async def roll(engines: RestartableEngines, clock: Clock, *, may_move: bool) -> None:
    """Restart the engines of a set; with `may_move` off, each waits until its requests have ended. Mutates."""
    for replica in engines.replicas:
        if not replica.is_ready:
            continue
        engines.close_to_requests(replica)
        try:
            await _restart(engines, replica, clock, may_move)
        finally:
            engines.open_to_requests(replica)


async def drain(engines: RestartableEngines, replica: Replica, clock: Clock, *, may_move: bool) -> None:
    """Wait until an engine that is closed to new requests has none left; move those that take long. Mutates."""
    end_s = clock.now() + DRAIN_S
    while engines.book.num_at(replica) and replica.is_ready:
        others = [other for other in engines.replicas if other is not replica and other.is_ready]
        if not may_move or (clock.now() < end_s and others):
            await asyncio.sleep(LOOK_S)
            continue
        moved = engines.move(replica, MOVED_AT_ONCE)
        while others and not all(map(engines.book.has_started, moved)):
            await asyncio.sleep(LOOK_S)


async def _restart(engines: RestartableEngines, replica: Replica, clock: Clock, may_move: bool) -> None:
    epoch = replica.epoch
    await drain(engines, replica, clock, may_move=may_move)
    if replica.epoch == epoch:  # else it has died and was restarted in the meantime
        replica.recycle()
    while replica.epoch == epoch or not replica.is_ready:
        if replica.state in (ModelState.FAILED, ModelState.CLOSED):
            raise ExecutionError(f"replica {replica.index} has not come back: {replica.failure}")
        await asyncio.sleep(LOOK_S)
