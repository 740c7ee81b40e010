"""MemorySnapshot: the state of the KV memory at one moment, as a value.

It is read from the manager's own pool, tables and ledger, so that drawings show the engine's real state.
`describe_changes` compares two snapshots, and returns what happened to each block in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.core.request import Request, RequestStatus
from quire.core.step import NO_BLOCK, BlockCopy
from quire.memory.block import Block, BlockState
from quire.memory.ledger import MemoryLedger
from quire.memory.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class BlockView:
    """One block. `holders`: the sequences whose tables hold it; `content`: the sequence whose tokens it keeps.

    `origin`: the tier that its bytes came from, disk or host; empty if they were computed.
    """

    block_id: int
    state: BlockState
    ref_count: int
    holders: tuple[str, ...]
    num_stored: int
    published_at: int
    content: str
    origin: str = ""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence that has not ended: its table and number of stored tokens, or where it waits."""

    name: str
    status: RequestStatus
    block_ids: tuple[int, ...]
    num_stored: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """All blocks in the order of their ids, all sequences, and the ledger, at one moment."""

    block_size: int
    blocks: tuple[BlockView, ...]
    sequences: tuple[SequenceView, ...]
    ledger: MemoryLedger


def sequence_name(request: Request) -> str:
    """Return the letter of a sequence: the request's own letter, or the next letters for branches of its group.

    >>> sequence_name(Request("A", [1])), sequence_name(Request("A", [1]).open_branch(2))
    ('A', 'C')
    """
    return request.request_id if not request.branch else chr(ord(request.request_id[0]) + request.branch)


def read_snapshot(
    memory: KVCacheManager,
    waiting: Iterable[Request] = (),
    previous: MemorySnapshot | None = None,
    arrived: Mapping[int, str] = MappingProxyType({}),
) -> MemorySnapshot:
    """Read the state of the memory. Does not mutate; O(blocks).

    `waiting`: sequences without memory to list as well; `previous`: the previous snapshot, which knows whose tokens the
    cached blocks keep; `arrived`: the blocks that were loaded from another tier since then.
    """
    size = memory.spec.block_size
    holders: dict[int, list[str]] = {}
    stored: dict[int, int] = {}
    sequences = [SequenceView(sequence_name(request), request.status, (), 0, 0) for request in waiting]
    for request, sequence in memory.memories.items():
        name = sequence_name(request)
        for table in sequence.tables:
            for index, block_id in enumerate(table.block_ids):
                if block_id != NO_BLOCK:
                    holders.setdefault(block_id, []).append(name)
                    filled = min(max(request.num_computed - index * size, 0), size)
                    stored[block_id] = max(stored.get(block_id, 0), filled)
        block_ids = tuple(block_id for table in sequence.tables for block_id in table.held)
        num_host_blocks = sum(map(len, sequence.host_blocks or ()))
        sequences.append(SequenceView(name, request.status, block_ids, request.num_computed, num_host_blocks))
    views = []
    for block in memory.pool.blocks:
        known = previous.blocks[block.block_id] if previous is not None else None
        names = tuple(sorted(holders.get(block.block_id, ())))
        view = _view(block, names, size if block.entry is not None else stored.get(block.block_id, 0), known)
        origin = arrived.get(block.block_id, _kept_origin(view, known))
        views.append(replace(view, origin="" if view.state is BlockState.FREE else origin))
    return MemorySnapshot(size, tuple(views), tuple(sorted(sequences, key=lambda view: view.name)), memory.ledger())


def _view(block: Block, holders: tuple[str, ...], num_stored: int, known: BlockView | None) -> BlockView:
    """Return the view of a block. Published content keeps the name of the first sequence that held it."""
    published_at = block.published_at if block.entry is not None else 0
    content = holders[0] if holders else ""
    if known is not None and published_at and (known.published_at == published_at or not holders):
        content = known.content
    return BlockView(block.block_id, block.state, block.ref_count, holders, num_stored, published_at, content)


def _kept_origin(view: BlockView, known: BlockView | None) -> str:
    """Return the previous origin of a block, if its bytes are still the same."""
    if known is None:
        return ""
    is_same = bool(set(known.holders) & set(view.holders))
    is_same = is_same or (view.published_at > 0 and view.published_at == known.published_at)
    return known.origin if is_same else ""


def describe_changes(before: MemorySnapshot, after: MemorySnapshot, copies: Iterable[BlockCopy] = ()) -> dict[int, str]:
    """Return a word for each block whose holders or state changed between two snapshots. Does not mutate."""
    sources = {copy.destination: copy.source for copy in copies}
    changes = {}
    for old, new in zip(before.blocks, after.blocks, strict=True):
        word = f"copy←{sources[new.block_id]}" if new.block_id in sources else _describe(old, new)
        if word:
            changes[new.block_id] = word
    return changes


def _describe(old: BlockView, new: BlockView) -> str:
    if new.state is BlockState.IN_USE:
        if old.state is BlockState.CACHED:
            return "hit" if old.published_at == new.published_at else "evicted"
        if old.state is BlockState.FREE:
            return "new"
        return _describe_holders(old, new)
    if old.state is new.state and old.published_at == new.published_at:
        return ""
    return "cached" if new.state is BlockState.CACHED else "freed"


def _describe_holders(old: BlockView, new: BlockView) -> str:
    joined = [name for name in new.holders if name not in old.holders]
    left = [name for name in old.holders if name not in new.holders]
    if joined and left:
        return "new"
    if joined:
        return f"{joined[0]} joins" if len(joined) == 1 else f"{len(joined)} join"
    if left:
        return f"{left[0]} leaves" if len(left) == 1 else f"{len(left)} leave"
    return ""
