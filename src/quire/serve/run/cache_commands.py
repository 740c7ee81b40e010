"""Cache jobs: an operator's request makes engines write prompts to disk or import blocks, and waits for them.

    keep   a prompt ──► the engine that holds its blocks ──┐
    take   a bundle ──► every running engine ──────────────┴─► EngineStats.jobs: progress ──► the request continues

Each engine has its own cache and store. A prompt is stored by the engine that holds it, to which the router also sends
the next request with that prefix. A bundle goes to all engines: the router does not know what is on a disk.

An engine reports ten times a second, and at once when it is idle. A job ends with its request.
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
from quire.engine.replicas.fetches import StoringEngines

LOOK_S: Final = 0.01
ReadBlocks = Callable[[int, int], Awaitable[tuple[KeptBlock, ...]]]
BLOCKS_AT_ONCE: Final = 128
"""Blocks of a bundle that an engine registers between two steps."""


def engines_of(model: StoringEngines) -> dict[int, ReplicaStats]:
    """Return a model's running engines, by number. Does not mutate."""
    stats = model.stats()
    alone = ReplicaStats(model.state, "", stats.num_running, stats.restarts_total, {}, stats)
    return {index: each for index, each in enumerate(stats.replicas or (alone,)) if each.state.has_engine}


@dataclass(frozen=True, slots=True)
class Kept:
    """A stored prompt: its engine and the job's result."""

    replica: int
    engine: EngineStats
    job: CacheJob


@dataclass(frozen=True, slots=True)
class _Job:
    name: str
    restarts: Mapping[int, int]  # of its engines, when it began


class CacheCommands:
    """The jobs of one request to a model. `name`: the id of the request."""

    def __init__(self, model: StoringEngines, name: str) -> None:
        self._model = model
        self._name = name
        self._num_jobs = 0

    async def keep(self, prompts: Sequence[Add], block_size: int, *, wants_slots: bool = False) -> list[Kept]:
        """Write the cached blocks of prompts to disk; return the results."""
        found = []
        for prompt in prompts:
            names = prompt.names(block_size)
            replica = self._model.holder(names, prompt.scope)
            found += await self.keep_at([replica], names, prompt.scope, wants_slots=wants_slots)
        return found

    async def keep_at(
        self, replicas: Sequence[int], tokens: array[int], scope: CacheScope, *, wants_slots: bool
    ) -> list[Kept]:
        """Write a prompt's blocks in the caches of some engines to their disks; return each engine's result."""
        with self._job(replicas) as job:
            for replica in replicas:
                self._model.send_to(replica, KeepPrompt(job.name, tokens, scope, wants_slots))
            return [Kept(replica, *await self._ended(job, replica)) for replica in replicas]

    async def take(
        self, bundle: str, num_blocks: int, read: ReadBlocks, replicas: Sequence[int] | None = None
    ) -> list[CacheJob]:
        """Import a checked bundle into engines, all by default; return each engine's result.

        `bundle`: the path of its file. `read(first, end)` returns a range of its blocks.
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
        # A name is never reused, because an engine's report may be a moment old.
        job = _Job(f"{self._name}-{self._num_jobs}", {index: there[index].restarts_total for index in replicas})
        try:
            yield job
        finally:
            for replica in engines_of(self._model).keys() & job.restarts.keys():
                self._model.send_to(replica, EndJob(job.name))

    async def _ended(self, job: _Job, replica: int, num_seen: int = 0) -> tuple[EngineStats, CacheJob]:
        """Wait until a job has seen `num_seen` blocks and written them; return it. Raises if its engine is lost."""
        while True:
            there = engines_of(self._model).get(replica)
            if there is None or there.restarts_total != job.restarts[replica]:
                raise ExecutionError("the engine was lost meanwhile")
            found = there.engine.jobs.get(job.name)
            if found is not None and found.num_seen == num_seen and not found.num_pending:
                return there.engine, found
            await asyncio.sleep(LOOK_S)
