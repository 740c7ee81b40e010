"""CacheJobs: operators' jobs for the disk cache, and their progress: prompts to store, and bundles to import.

A job exists until `end` is called. It changes no block in memory: imported blocks go to the disk.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.core.kept_block import CacheJob, KeptBlock
from quire.core.request import CacheScope
from quire.core.step import NO_BLOCK
from quire.memory.block_hash import root_key
from quire.memory.hits import PrefixHits
from quire.memory.prefix import PrefixEntry, PrefixIndex
from quire.memory.tiers.disk import DiskTier


@dataclass(slots=True)
class _Job:
    """`path`: entries of a prompt. `entries`: those of a bundle, by serial; `last`: entries and groups stored last."""

    path: tuple[PrefixEntry, ...] = ()
    wants_slots: bool = False
    entries: dict[int, PrefixEntry] = field(default_factory=dict)
    last: list[tuple[PrefixEntry, int]] = field(default_factory=list)
    num_seen: int = 0
    num_known: int = 0
    num_left_out: int = 0


class CacheJobs:
    """The jobs, by the names that the server gave them."""

    def __init__(self, block_size: int, index: PrefixIndex, disk: DiskTier, hits: PrefixHits) -> None:
        self._block_size = block_size
        self._index = index
        self._disk = disk
        self._hits = hits
        self._jobs: dict[str, _Job] = {}

    def keep(self, name: str, tokens: array[int], scope: CacheScope, *, wants_slots: bool) -> None:
        """Store the cached blocks of a prompt. Mutates; O(blocks)."""
        num_full = len(tokens) // self._block_size * self._block_size
        known = self._index.match(root_key(scope), tokens[:num_full].tobytes())
        self._jobs[name] = _Job(tuple(known), wants_slots)
        if known:
            self._disk.keep_path(known[-1], scope, is_asked_for=True)

    def take(self, name: str, bundle: str, blocks: Sequence[KeptBlock]) -> None:
        """Store blocks of a bundle, parents first; the `slot` of each is its index there. Mutates; O(blocks)."""
        job = self._jobs.setdefault(name, _Job())
        job.num_left_out += self._num_lost(job)
        job.last = []
        for block in blocks:
            job.num_seen += 1
            parent = job.entries.get(block.parent)
            if block.scope is not None:
                parent = self._index.root(root_key(block.scope))
            entry = None if parent is None else self._index.extend(parent, block.tokens)
            if entry is None:
                job.num_left_out += 1
                continue
            job.entries[block.serial] = entry
            self._take(job, bundle, entry, block)

    def _take(self, job: _Job, bundle: str, entry: PrefixEntry, block: KeptBlock) -> None:
        disk = self._disk
        if disk.slots.slot(entry, block.group) != NO_BLOCK:
            disk.slots.touch(entry)
            job.num_known += 1
        elif disk.bring(entry, block.group, block.scope or CacheScope(), bundle, block.slot):
            job.last.append((entry, block.group))
        else:
            job.num_left_out += 1
            self._index.discard(entry)

    def end(self, name: str) -> None:
        """Forget a job; its stores in flight still finish. Mutates."""
        self._jobs.pop(name, None)

    def figures(self) -> Mapping[str, CacheJob]:
        """Return the progress of each job. Does not mutate; O(blocks of the jobs)."""
        return {name: self._figures(job) for name, job in self._jobs.items()}

    def _figures(self, job: _Job) -> CacheJob:
        size, endless = self._block_size, (len(job.path) + 1) * self._block_size
        num_cached = self._hits.usable(self._hits.places(job.path), endless)
        places = self._disk.written_slots(job.path)
        num_stored = self._hits.usable(places, endless)
        slots = [slot for place in places[:num_stored] for slot in place if slot != NO_BLOCK] if job.wants_slots else ()
        num_pending = self._disk.num_storing({*job.path, *(entry for entry, _ in job.last)})
        return CacheJob(
            num_pending,
            num_cached * size,
            num_stored * size,
            tuple(slots),
            job.num_seen,
            job.num_known,
            job.num_left_out + self._num_lost(job),
        )

    def _num_lost(self, job: _Job) -> int:
        """Return how many of the blocks stored last were not written after all: damaged, or without room."""
        return sum(self._disk.slots.slot(entry, group) == NO_BLOCK for entry, group in job.last)
