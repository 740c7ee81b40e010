"""Fetches: copies a prefix from the engine that holds it to the one chosen for a request, if that beats computing it.

    Router ──► engine 1, which lacks blocks of engine 0 ──► hold the part ──► Courier: ask, move ──┬──► send it
                                                                 └── late, failed, not worth it ───┘

The blocks are copied from disk to disk, with the records and checksums of a bundle, so they are ordinary cache hits. A
fetch is worth it if it should take less than half the time of computing the prefix. The estimate uses measured times:
of a token in the chosen engine, of earlier fetches, and of loads from its disk. After that half the request is sent
without the prefix. So a link that has become slow delays one request by half the time of computing, and later ones not
at all.

One prefix is fetched at a time: requests for the same prefix wait for it, and all others compute.
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
from quire.memory.tiers.rates import smoothed
from quire.routing.prompts import RoutedPrompt
from quire.routing.router import Loan, Router

logger = logging.getLogger("quire.engine")

MARGIN: Final = 2.0
LEAST_S: Final = 0.1
"""Never fetch to save less time than this: engines report their progress ten times a second."""
LONGEST_S: Final = 10.0
RETRY_EVERY: Final = 64
"""Try one in this many fetches that are estimated not to pay: a link may have recovered."""
CLOSING_S: Final = 1.0

DONE, THERE, LATE, LEFT = "done", "there already", "late", "left"
BUSY, NOT_WORTH = "busy", "not worth it"
FAILED: Final = "failed"


class StoringEngines(Protocol):
    """The engines of a model, for a courier that makes them write and take blocks."""

    @property
    def state(self) -> ModelState:
        """The state of the set."""
        ...

    def stats(self) -> EngineStats:
        """Return their latest counters."""
        ...

    def send_to(self, replica: int, command: AnyCommand) -> None:
        """Send a command to one of them."""
        ...

    def holder(self, tokens: array[int], scope: CacheScope) -> int:
        """Return the number of the engine that holds most of a prompt; raises `ExecutionError` if none runs."""
        ...


class Errand(NamedTuple):
    """A courier's task: copy the blocks of `tokens`, which fill whole blocks, from one engine to another."""

    source: Replica
    target: Replica
    tokens: array[int]
    scope: CacheScope


class StoredBlocks(NamedTuple):
    """The place of blocks: the stores of both engines, and the slots in the source's."""

    source_store: str
    target_store: str
    slots: tuple[int, ...]


class Courier(Protocol):
    """Copies blocks from the store of an engine to that of another. Raises `FetchError`."""

    async def ask(self, engines: StoringEngines, errand: Errand) -> StoredBlocks | None:
        """Make the source write the blocks to its disk; return their place, or None if the target has them all."""
        ...

    async def move(self, engines: StoringEngines, errand: Errand, stored: StoredBlocks) -> int:
        """Copy the stored blocks and make the target take them in; return the number of bytes."""
        ...


class FetchRates:
    """The measured times of fetches: until the source has written the blocks, and to move each block.

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
        """Return the expected time of a fetch; 0 before the first one. Does not mutate."""
        return (self._ask_s or 0.0) + num_blocks * (self._block_s or 0.0)

    def note_asked(self, seconds: float) -> None:
        """Record the time until the source had written the blocks. Mutates."""
        self._ask_s = smoothed(self._ask_s, seconds)

    def note_moved(self, num_blocks: int, seconds: float) -> None:
        """Record the time to move blocks. Mutates."""
        self._block_s = smoothed(self._block_s, seconds / num_blocks)


@dataclass(eq=False, slots=True)
class Fetch:
    """A prefix that is being fetched, and the parts that are held for it."""

    errand: Errand
    num_blocks: int
    digest: bytes  # of its last block
    limit_s: float
    work: asyncio.Task[str]
    parts: dict[Part, Add] = field(default_factory=dict)

    def brings(self, replica: Replica, prompt: RoutedPrompt) -> bool:
        """Whether this fetch copies the beginning of a prompt to an engine. Does not mutate; O(1)."""
        last = prompt.digests[self.num_blocks - 1 : self.num_blocks]
        return replica is self.errand.target and last == (self.digest,)

    def hold(self, part: Part, add: Add) -> None:
        """Hold a part until the prefix has arrived or the part leaves its engine. Mutates."""
        self.parts[part], part.fetch = add, self

    def leave(self, part: Part) -> None:
        """Stop holding a part, without sending it; cancel the fetch after the last one. Mutates."""
        del self.parts[part]
        part.fetch = None
        if not self.parts:
            self.work.cancel()

    def release(self) -> None:
        """Send the held parts to their engine; if it is ending, keep them, so that they go elsewhere. Mutates."""
        if not self.errand.target.state.has_engine:
            return
        for part, add in self.parts.items():
            part.fetch = None
            self.errand.target.send(add)
        self.parts.clear()


class Fetches:
    """Decides which prefixes to fetch, and holds parts meanwhile. Use it in one event loop.

    `counts`: the fetches by outcome; `num_blocks`, `num_bytes`, `seconds`: totals of the successful ones.
    """

    def __init__(
        self, engines: StoringEngines, replicas: Sequence[Replica], router: Router, courier: Courier, clock: Clock
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
        """Hold a part that was just routed, if its prefix is or should be fetched; False: send it now. Mutates."""
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
        size = self._router.block_size
        tokens = (add.names(size) + add.output_token_ids)[: loan.num_held * size]
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
        """Return the numbers of the engines whose blocks the target can use for a request. Does not mutate."""
        reads_cache = add.sampling.prompt_logprobs is None and add.pooling is None
        if not (reads_cache and may_be_kept(add.scope) and _keeps(target)):
            return []
        others = (each for each in self._replicas if each is not target and each.is_ready and _keeps(each))
        return [each.index for each in others if each.fingerprint == target.fingerprint]

    def _limit_s(self, loan: Loan, target: EngineStats) -> float:
        """Return the time limit of a fetch; 0: it is not worth it. Mutates the counts."""
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
        """Wait for a fetch, and send the held parts when it is done, late or failed."""
        work = fetch.work
        try:
            await asyncio.wait([work], timeout=fetch.limit_s)
            is_late = bool(fetch.parts) and not work.done()
            work.cancel()
            fetch.release()
            await asyncio.wait([work])  # a read may hang: no part waits for it, but no other fetch begins
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
        """Wait for the last fetch, up to `CLOSING_S`: it may hang on a disk."""
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSING_S)
            self._task.cancel()


def _keeps(replica: Replica) -> bool:
    """Whether an engine has a working disk cache."""
    return bool(replica.stats.disk_store) and not replica.stats.disk_is_off


def _outcome(work: asyncio.Task[str]) -> str:
    """Return the outcome of a fetch that was not cancelled."""
    error = work.exception()
    if error is None:
        return work.result()
    if isinstance(error, FetchError):
        return error.reason
    logger.error("a prefix could not be fetched", exc_info=error)
    return FAILED
