"""Jobs of the cache: an operator's call has engines write prompts to the disk, or take blocks in, and waits for them.

    keep   a prompt ──► the engine that holds its blocks ──┐
    take   a bundle ──► every engine that is there ────────┴─► EngineStats.jobs: how far it is ──► the call goes on

Each engine has a cache and a store of its own. A prompt is kept where it is, which is where the router sends the next
request that begins like it. A bundle goes to all: the router does not know what is on a disk.

An engine tells ten times a second, and at once when it has nothing else to do. A job ends with its call.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from quire.core.errors import ExecutionError
from quire.core.kept_block import CacheJob, KeptBlock
from quire.core.request import CacheScope
from quire.engine.commands import Add, EndJob, KeepPrompt, TakeBlocks
from quire.engine.records.stats import EngineStats, ReplicaStats
from quire.engine.replicas.fetches import Engines

LOOK_S: Final = 0.01
ReadBlocks = Callable[[int, int], Awaitable[tuple[KeptBlock, ...]]]
BLOCKS_AT_ONCE: Final = 128
"""Blocks of a bundle that an engine takes note of between two steps."""


def engines_of(model: Engines) -> dict[int, ReplicaStats]:
    """Return the engines of a model that are there, by number. Does not mutate."""
    stats = model.stats()
    alone = ReplicaStats(model.state, "", stats.num_running, stats.restarts_total, {}, stats)
    return {index: each for index, each in enumerate(stats.replicas or (alone,)) if each.state.has_engine}


@dataclass(frozen=True, slots=True)
class Kept:
    """A prompt that was kept: where, and how far that went."""

    replica: int
    engine: EngineStats
    job: CacheJob


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    restarts: Mapping[int, int]  # of the engines that do it, when it began


class CacheJobs:
    """The jobs of one call at a model. `name`: that of the call."""

    def __init__(self, model: Engines, name: str) -> None:
        self._model = model
        self._name = name
        self._num_jobs = 0

    async def keep(self, prompts: Sequence[Add], *, wants_slots: bool = False) -> list[Kept]:
        """Have what the cache has of prompts written to the disk; return how far that went."""
        found = []
        for prompt in prompts:
            replica = self._model.holder(prompt.prompt_token_ids, prompt.scope)
            found += await self.keep_at([replica], prompt.prompt_token_ids, prompt.scope, wants_slots=wants_slots)
        return found

    async def keep_at(
        self, replicas: Sequence[int], tokens: array[int], scope: CacheScope, *, wants_slots: bool = False
    ) -> list[Kept]:
        """Have what the caches of some engines have of a prompt written to their disks; return how far each is."""
        with self._job(replicas) as job:
            for replica in replicas:
                self._model.send_to(replica, KeepPrompt(job.name, tokens, scope, wants_slots))
            return [Kept(replica, *await self._ended(job, replica)) for replica in replicas]

    async def take(
        self, bundle: str, num_blocks: int, read: ReadBlocks, replicas: Sequence[int] | None = None
    ) -> list[CacheJob]:
        """Have engines, all by default, take in a bundle that was checked; return what became of its blocks in each.

        `bundle`: its file, of which `read` returns blocks from a place to another.
        """
        states = list[CacheJob]()
        with self._job(list(engines_of(self._model)) if replicas is None else replicas) as job:
            for first in range(0, num_blocks, BLOCKS_AT_ONCE):
                end = min(first + BLOCKS_AT_ONCE, num_blocks)
                blocks = await read(first, end)
                for replica in job.restarts:
                    self._model.send_to(replica, TakeBlocks(job.name, bundle, blocks))
                states = [(await self._ended(job, replica, num_seen=end))[1] for replica in job.restarts]
        return states or [CacheJob()] * len(job.restarts)

    @contextmanager
    def _job(self, replicas: Sequence[int]) -> Iterator[_Job]:
        self._num_jobs += 1
        there = engines_of(self._model)
        if not replicas or not there.keys() >= set(replicas):
            raise ExecutionError("the engine is not running")
        # The name is never used again: what is told may be of a moment ago.
        job = _Job(f"{self._name}-{self._num_jobs}", {index: there[index].restarts_total for index in replicas})
        try:
            yield job
        finally:
            for replica in engines_of(self._model).keys() & job.restarts.keys():
                self._model.send_to(replica, EndJob(job.name))

    async def _ended(self, job: _Job, replica: int, num_seen: int = 0) -> tuple[EngineStats, CacheJob]:
        """Return a job that has seen `num_seen` blocks, when all are written; raises if its engine is lost."""
        while True:
            there = engines_of(self._model).get(replica)
            if there is None or there.restarts_total != job.restarts[replica]:
                raise ExecutionError("the engine was lost meanwhile")
            found = there.engine.jobs.get(job.name)
            if found is not None and found.num_seen == num_seen and not found.num_pending:
                return there.engine, found
            await asyncio.sleep(LOOK_S)
