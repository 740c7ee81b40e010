"""Fetches: a prefix that another engine holds is copied to the one that was chosen, if that beats computing it.

    Router ──► engine 1, which lacks blocks of engine 0 ──► the part is held ──► Courier: ask, move ──┬──► it is sent
                                                                 └── late, failed, not worth it ──────┘

The blocks go from disk to disk, by the records and checksums of a bundle, so the engine hits them as it hits its own. A
fetch is worth it if it is expected to take less than half the time of computing, by measured times: of a token at the
engine that was chosen, of earlier fetches, and of loads from its disk. It may take that half and no longer. So a link
that has become slow costs a request half as much again, and the next ones nothing.

One prefix travels at a time: a burst for the same one waits for it, and all others compute.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from quire.core.clock import Clock
from quire.core.kept_block import FetchError, may_be_kept
from quire.core.request import CacheScope
from quire.engine.commands import Add, AnyCommand
from quire.engine.records.stats import EngineStats, ModelState
from quire.engine.replicas.parts import Part
from quire.engine.replicas.replica import Replica
from quire.routing.prompts import RoutedPrompt
from quire.routing.router import Loan, Router

logger = logging.getLogger("quire.engine")

MARGIN: Final = 2.0
LEAST_S: Final = 0.1
"""Less computing is never spared: engines tell how far they are ten times a second."""
LONGEST_S: Final = 10.0
RETRY_EVERY: Final = 64
"""One in this number of fetches that do not seem to pay is done: a link may have recovered."""
SMOOTHING: Final = 0.3
CLOSING_S: Final = 1.0

DONE, THERE, LATE, LEFT = "done", "there already", "late", "left"
BUSY, NOT_WORTH = "busy", "not worth it"
FAILED: Final = "failed"


class Engines(Protocol):
    """The engines of a model, for those that have them write blocks and take some in."""

    @property
    def state(self) -> ModelState:
        """What they are together."""
        ...

    def stats(self) -> EngineStats:
        """Return their last counts."""
        ...

    def send_to(self, replica: int, command: AnyCommand) -> None:
        """Send a command to one of them."""
        ...

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the one that holds the most of a prompt; raises `ExecutionError` without any."""
        ...


class Errand(NamedTuple):
    """What a courier is to bring: the blocks of `tokens`, which are whole blocks, from one engine to another."""

    source: Replica
    target: Replica
    tokens: array[int]
    scope: CacheScope


class StoredBlocks(NamedTuple):
    """Where blocks are: the stores of both engines, and the slots of the source."""

    source_store: str
    target_store: str
    slots: tuple[int, ...]


class Courier(Protocol):
    """Copies blocks from the store of an engine to that of another. Raises `FetchError`."""

    async def ask(self, engines: Engines, errand: Errand) -> StoredBlocks | None:
        """Have the source write the blocks to its disk; None: the target has them all."""
        ...

    async def move(self, engines: Engines, errand: Errand, stored: StoredBlocks) -> int:
        """Copy what was found, and have the target take it in; return how many bytes that were."""
        ...


class FetchRates:
    """The measured times of fetches: until the source has written, and of each block on its way.

    >>> rates = FetchRates()
    >>> rates.expected_s(100)
    0.0
    >>> rates.note_asked(0.25); rates.note_moved(100, 0.5)
    >>> rates.expected_s(200)
    1.25
    """

    def __init__(self) -> None:
        self._ask_s: float | None = None
        self._block_s: float | None = None

    def expected_s(self, num_blocks: int) -> float:
        """Return how long a fetch will take; 0 as long as none was done. Does not mutate."""
        return (self._ask_s or 0.0) + num_blocks * (self._block_s or 0.0)

    def note_asked(self, seconds: float) -> None:
        """Take note of how long it took to ask. Mutates."""
        self._ask_s = _smoothed(self._ask_s, seconds)

    def note_moved(self, num_blocks: int, seconds: float) -> None:
        """Take note of how long blocks were on their way. Mutates."""
        self._block_s = _smoothed(self._block_s, seconds / num_blocks)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)


@dataclass(eq=False, slots=True)
class Fetch:
    """A prefix on its way, and the parts that are held for it."""

    errand: Errand
    num_blocks: int
    digest: bytes  # of its last block
    limit_s: float
    work: asyncio.Task[str]
    parts: dict[Part, Add] = field(default_factory=dict)

    def brings(self, replica: Replica, prompt: RoutedPrompt) -> bool:
        """Whether an engine will have the beginning of a prompt by it. Does not mutate; O(1)."""
        last = prompt.digests[self.num_blocks - 1 : self.num_blocks]
        return replica is self.errand.target and last == (self.digest,)

    def hold(self, part: Part, add: Add) -> None:
        """Hold a part back, until the prefix is there or it leaves its engine. Mutates."""
        self.parts[part], part.fetch = add, self

    def leave(self, part: Part) -> None:
        """A part is not to be sent any more; nobody waits after the last one. Mutates."""
        del self.parts[part]
        part.fetch = None
        if not self.parts:
            self.work.cancel()

    def release(self) -> None:
        """Send what was held; an engine that is ending leaves it unsent, so that it goes elsewhere. Mutates."""
        if not self.errand.target.state.has_engine:
            return
        for part, add in self.parts.items():
            part.fetch = None
            self.errand.target.send(add)
        self.parts.clear()


class Fetches:
    """Decides what is fetched, and holds parts meanwhile. Use it in one event loop.

    `counts`: what became of fetches; `num_blocks`, `num_bytes`, `seconds`: of those that came.
    """

    def __init__(
        self, engines: Engines, replicas: Sequence[Replica], router: Router, courier: Courier, clock: Clock
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.num_blocks = self.num_bytes = 0
        self.seconds = 0.0
        self.rates = FetchRates()
        self._engines = engines
        self._replicas = replicas
        self._router = router
        self._courier = courier
        self._clock = clock
        self._fetch: Fetch | None = None
        self._task: asyncio.Task[None] | None = None

    def holds(self, part: Part, add: Add, prompt: RoutedPrompt) -> bool:
        """Hold a part that was just routed, if its prefix is fetched, now or already; False: send it. Mutates."""
        target, fetch = part.replica, self._fetch
        if target is None or part.num_deaths:  # a suspect computes everything itself
            return False
        if fetch is not None and fetch.parts and fetch.brings(target, prompt):
            fetch.hold(part, add)
            return True
        loan = self._router.lender(part.name, prompt, self._lenders(target, add))
        limit_s = 0.0 if loan is None else self._limit_s(loan, target.stats)
        if loan is None or not limit_s:
            return False
        if fetch is not None:
            self.counts[BUSY] += 1
            return False
        tokens = (add.prompt_token_ids + add.output_token_ids)[: loan.num_held * self._router.block_size]
        errand = Errand(self._replicas[loan.lender], target, tokens, add.scope)
        work = asyncio.create_task(self._move(errand, loan.num_held), name="quire-courier")
        self._fetch = Fetch(errand, loan.num_held, prompt.digests[loan.num_held - 1], limit_s, work)
        self._fetch.hold(part, add)
        self._task = asyncio.create_task(self._run(self._fetch), name="quire-fetch")
        return True

    def figures(self) -> dict[str, Any]:
        """Return the counters for monitoring, by their names in `EngineStats`. Does not mutate."""
        return {
            "fetches": dict(self.counts),
            "fetched_blocks_total": self.num_blocks,
            "fetched_bytes_total": self.num_bytes,
            "fetch_s_total": self.seconds,
        }

    def _lenders(self, target: Replica, add: Add) -> list[int]:
        """Return the numbers of the engines from which an engine may have blocks for a request. Does not mutate."""
        reads_cache = add.sampling.prompt_logprobs is None and add.pooling is None
        if not (reads_cache and may_be_kept(add.scope) and _keeps(target)):
            return []
        others = (each for each in self._replicas if each is not target and each.is_ready and _keeps(each))
        return [each.index for each in others if each.fingerprint == target.fingerprint]

    def _limit_s(self, loan: Loan, target: EngineStats) -> float:
        """Return how long a fetch may take; 0: it is not worth it. Mutates the counts."""
        num_missing = loan.num_held - loan.num_known
        token_us = target.token_us or self._replicas[loan.lender].stats.token_us
        spared_s = num_missing * self._router.block_size * token_us / 1e6
        if spared_s < LEAST_S:
            return 0.0
        limit_s = min(spared_s / MARGIN, LONGEST_S)
        if self.rates.expected_s(loan.num_held) + num_missing * target.load_us / 1e6 >= limit_s:
            self.counts[NOT_WORTH] += 1
            return 0.0 if self.counts[NOT_WORTH] % RETRY_EVERY else limit_s
        return limit_s

    async def _run(self, fetch: Fetch) -> None:
        """Fetch, and send what was held when that is done, late or failed."""
        work = fetch.work
        try:
            await asyncio.wait([work], timeout=fetch.limit_s)
            is_late = bool(fetch.parts) and not work.done()
            work.cancel()
            fetch.release()
            await asyncio.wait([work])  # what it reads may hang: nobody waits for it, but nothing else is fetched
        finally:
            work.cancel()
            self._fetch = None
        reason = LATE if is_late else LEFT if work.cancelled() else _outcome(work)
        self.counts[reason] += 1
        if reason not in (DONE, THERE, LEFT):
            self.rates.note_moved(fetch.num_blocks, fetch.limit_s)

    async def _move(self, errand: Errand, num_blocks: int) -> str:
        began_s = self._clock.now()
        stored = await self._courier.ask(self._engines, errand)
        asked_s = self._clock.now()
        self.rates.note_asked(asked_s - began_s)
        if stored is None:
            return THERE
        num_bytes = await self._courier.move(self._engines, errand, stored)
        moved_s = self._clock.now()
        self.rates.note_moved(num_blocks, moved_s - asked_s)
        self.num_blocks += len(stored.slots)
        self.num_bytes += num_bytes
        self.seconds += moved_s - began_s
        return DONE

    async def close(self) -> None:
        """Wait for the end of what nobody waits for any more; what hangs on a disk is left behind."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSING_S)
            self._task.cancel()


def _keeps(replica: Replica) -> bool:
    """Whether an engine has a cache on disk that works."""
    return bool(replica.stats.disk_store) and not replica.stats.disk_is_off


def _outcome(work: asyncio.Task[str]) -> str:
    """Return what became of a fetch that ended by itself."""
    error = work.exception()
    if error is None:
        return work.result()
    if isinstance(error, FetchError):
        return error.reason
    logger.error("a prefix could not be fetched", exc_info=error)
    return FAILED
