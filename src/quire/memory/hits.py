"""PrefixHits: finds the cached blocks of a prompt in each tier, and brings them into the tables of a sequence.

    on the device   shared, or copied if the block will be written and others hold it
    on the host     moved into a new block by the plan that admits the request; others can hit the block from then on
                    a tail that will be written is moved into a block that only this sequence holds, and not published

The plan being built moves a block at most once. Blocks that it moves to the host can be hit from the next plan on. A
block that it fills from the host is not copied on the device: the copy is moved from the host too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.errors import StaleMatchError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import Request
from quire.core.step import NO_BLOCK, BlockMove
from quire.memory.block_hash import root_key
from quire.memory.block_pool import BlockPool
from quire.memory.changes import MemoryChanges
from quire.memory.prefix import PrefixEntry, PrefixIndex
from quire.memory.sequence import Frontier, PrefixMatch
from quire.memory.tiers.host import HostTier


class Hit(NamedTuple):
    """A block of a match that is still needed: the block of the entry at `place`, counted from 0.

    `block_id`: on the device; `NO_BLOCK`: the block is moved from `host_id`.
    `is_copied`: the block will be written and others hold it, so it is copied.
    """

    group: int
    place: int
    block_id: int
    host_id: int
    is_copied: bool

    @property
    def is_shared(self) -> bool:
        """Whether the block of the device itself goes into the table."""
        return self.block_id != NO_BLOCK and not self.is_copied


class PrefixHits:
    """Looks up prompts. Only `bring` mutates."""

    def __init__(
        self, spec: KVCacheSpec, index: PrefixIndex, pool: BlockPool, host: HostTier, changes: MemoryChanges
    ) -> None:
        self._block_size = spec.block_size
        self._groups = spec.groups
        self._has_states = spec.has_recurrent_layers
        self.windows = [group for group, kind in enumerate(spec.groups) if kind.window is not None]
        self.full_groups = [group for group, kind in enumerate(spec.groups) if kind.window is None]
        self._index = index
        self._pool = pool
        self._host = host
        self._changes = changes

    def match(self, request: Request) -> PrefixMatch:
        """Return the cached prefix of the request's known tokens, at most all but the last. O(blocks matched).

        The match is empty if every position of the prompt must be computed. It ends in no image that is one step.
        """
        if request.reads_whole_prompt:
            return PrefixMatch([], 0, None)
        size, num_known = self._block_size, len(request.tokens)
        # A state after the last token does not contain the state before it, which computing that token needs.
        num_full = (num_known - self._has_states) // size
        root = root_key(request.scope)
        known = self._index.match(root, request.key(0, num_full * size))
        places = self.places(known)
        hits = self.usable(places, num_known)
        while request.unsplit(0, min(hits * size, num_known - 1)) != min(hits * size, num_known - 1):
            hits = self.usable(places[: hits - 1], num_known)
        num_tokens = min(hits * size, num_known - 1)
        frontier: Frontier | None = None
        if hits < num_full:
            after = known[hits - 1] if hits else root
            frontier = (after, request.key(hits * size, (hits + 1) * size))
        return PrefixMatch(known[:hits], num_tokens, frontier, known)

    def places(self, entries: Sequence[PrefixEntry]) -> list[list[int]]:
        """Return for each entry the block of each group: on the device, or else on the host."""
        if not self._host.keeps:
            return [entry.block_ids for entry in entries]
        return [
            [
                block_id if block_id != NO_BLOCK else self._host.place(entry, group)
                for group, block_id in enumerate(entry.block_ids)
            ]
            for entry in entries
        ]

    def usable(self, places: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Return how many leading entries can be hit: every group must have the blocks that it still needs.

        `places`: for each entry, the block of each group.
        """
        hits = len(places)
        for group in self.full_groups:
            for index in range(hits):
                if places[index][group] == NO_BLOCK:
                    hits = index
                    break
        if not self.windows:
            return hits
        in_a_row = dict.fromkeys(self.windows, 0)  # blocks present one after another, up to the current one
        best = 0
        for index in range(hits):
            next_position = min((index + 1) * self._block_size, num_tokens - 1)
            complete = True
            for group in self.windows:
                present = places[index][group] != NO_BLOCK
                in_a_row[group] = in_a_row[group] + 1 if present else 0
                first = self._groups[group].first_needed(next_position) // self._block_size
                complete = complete and in_a_row[group] >= index + 1 - first
            if complete:
                best = index + 1
        return best

    def of(self, match: PrefixMatch) -> list[Hit]:
        """Return the blocks of a match that are still needed; raises `StaleMatchError` if one was evicted."""
        num_hits = len(match.entries)
        ends_within = match.ends_within_block(self._block_size)
        hits = []
        for group, kind in enumerate(self._groups):
            for index in range(kind.first_needed(match.num_tokens) // self._block_size, num_hits):
                entry = match.entries[index]
                block_id, host_id = entry.block_ids[group], self._host.place(entry, group)
                is_written = ends_within and index == num_hits - 1
                is_copied = is_written and block_id != NO_BLOCK and self._pool.blocks[block_id].ref_count > 0
                if is_copied and host_id != NO_BLOCK and self._is_filled_now(block_id):
                    block_id, is_copied = NO_BLOCK, False
                if block_id == host_id == NO_BLOCK:
                    raise StaleMatchError(f"block {index} of the prefix match has been evicted; match the prefix again")
                hits.append(Hit(group, index, block_id, host_id, is_copied))
        return hits

    def _is_filled_now(self, block_id: int) -> bool:
        """Return whether the plan being built moves bytes into a block."""
        return any(move.device_block == block_id for move in self._changes.moves_in)

    def num_new_blocks(self, hit: Hit) -> int:
        """Return how many available blocks a hit takes: a new one, or a cached one."""
        return int(not hit.is_shared or not self._pool.blocks[hit.block_id].ref_count)

    def bring(self, match: PrefixMatch, hits: Sequence[Hit], blocks: list[int]) -> dict[tuple[int, int], int]:
        """Move hits on the host into blocks from the end of `blocks`; return the blocks of a tail that will be written.

        The other blocks are published. Mutates.
        """
        own, places = {}, set[int]()
        for hit in hits:
            if hit.block_id != NO_BLOCK:
                continue
            block_id = blocks.pop()
            self._changes.moves_in.append(BlockMove(block_id, hit.host_id))
            places.add(hit.place)
            if hit.place == len(match.entries) - 1 and match.ends_within_block(self._block_size):
                own[hit.group, hit.place] = block_id
            else:
                self._pool.adopt(block_id, self._host.block(hit.host_id))
        size = self._block_size
        match.num_host_tokens = sum(min((index + 1) * size, match.num_tokens) - index * size for index in places)
        return own
