"""Jobs of the cache: an operator's call has the engine write prompts to the disk, or take blocks in, and waits for it.

    command ──► engine: a job ──► EngineStats.jobs: how far it is ──► the call goes on

The engine tells ten times a second, and at once when it has nothing else to do. A job ends with its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

from quire.compute.worker.store.spool import Intake
from quire.core.errors import ExecutionError
from quire.core.kept_block import CacheJob
from quire.core.request import CacheScope
from quire.engine.commands import Add, EndJob, KeepPrompt, TakeBlocks
from quire.serve.bundles import Bundles
from quire.serve.model import ServedModel

LOOK_S: Final = 0.01
BLOCKS_AT_ONCE: Final = 128
"""Blocks of a bundle that the engine takes note of between two steps."""


class CacheJobs:
    """The jobs of one call at a model. `name`: that of the call."""

    def __init__(self, model: ServedModel, name: str) -> None:
        self._model = model
        self._name = name
        self._num_restarts = model.stats().restarts_total
        self._num_jobs = 0

    async def keep(self, prompts: Sequence[Add], *, wants_slots: bool = False) -> list[CacheJob]:
        """Have what the cache has of prompts written to the disk; return how far that went."""
        found = []
        for prompt in prompts:
            with self._job() as job:
                self._model.send(KeepPrompt(job, prompt.prompt_token_ids, prompt.scope, wants_slots))
                found.append(await self._ended(job))
        return found

    async def take(self, intake: Intake, scope: CacheScope, bundles: Bundles) -> CacheJob:
        """Have the engine take in a bundle that was checked; return what became of its blocks."""
        state = CacheJob()
        with self._job() as job:
            for first in range(0, intake.num_blocks, BLOCKS_AT_ONCE):
                end = min(first + BLOCKS_AT_ONCE, intake.num_blocks)
                blocks = await bundles.run(partial(intake.blocks, first, end, scope))
                self._model.send(TakeBlocks(job, str(intake.spool.path), blocks))
                state = await self._ended(job, num_seen=end)
        return state

    @contextmanager
    def _job(self) -> Iterator[str]:
        self._num_jobs += 1
        job = f"{self._name}-{self._num_jobs}"  # never used again: what is told may be of a moment ago
        try:
            yield job
        finally:
            if self._model.state.has_engine:
                self._model.send(EndJob(job))

    async def _ended(self, job: str, num_seen: int = 0) -> CacheJob:
        """Return a job that has seen `num_seen` blocks, when all are written; raises if the engine is lost."""
        while True:
            stats = self._model.stats()
            if not self._model.state.has_engine or stats.restarts_total != self._num_restarts:
                raise ExecutionError("the engine was lost meanwhile")
            found = stats.jobs.get(job)
            if found is not None and found.num_seen == num_seen and not found.num_pending:
                return found
            await asyncio.sleep(LOOK_S)
