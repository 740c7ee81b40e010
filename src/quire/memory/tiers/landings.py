"""Landings: blocks on the device that wait for their bytes from the disk, and the requests that wait for them.

Each block has a ticket. It is published when it arrives, unless its entry got another block meanwhile. With the last
ticket of a request all its blocks become cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.core.errors import InvariantError
from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.block_pool import BlockPool
from quire.memory.prefix import PrefixEntry
from quire.memory.sequence import Frontier
from quire.memory.tiers.slots import SlotBooks


@dataclass(slots=True)
class Landing:
    """The loads of one request. `arriving`: blocks to come, by ticket; `held`: its blocks that are present."""

    request: Request
    held: list[int]
    arriving: dict[int, tuple[PrefixEntry, int, int]] = field(default_factory=dict)  # entry, group, block


class Landings:
    """The loads in flight, by request. An entry with a load keeps its slot."""

    def __init__(self, slots: SlotBooks, pool: BlockPool) -> None:
        self._slots = slots
        self._pool = pool
        self._landings: dict[Request, Landing] = {}
        self._frontiers: Counter[Frontier] = Counter()
        self._attempted: dict[Request, int] = {}  # how many leading blocks of a prompt loads have covered
        self._arrived: dict[Request, tuple[int, int]] = {}  # the blocks that came from disk: the first, and the end

    def __len__(self) -> int:
        return len(self._landings)

    def __iter__(self) -> Iterator[Landing]:
        return iter(list(self._landings.values()))

    @property
    def num_blocks(self) -> int:
        """Blocks of the device that wait for their bytes."""
        return sum(len(landing.arriving) for landing in self._landings.values())

    def of(self, request: Request) -> Landing | None:
        """Return the loads of a request. Does not mutate; O(1)."""
        return self._landings.get(request)

    def with_ticket(self, ticket: int) -> Landing | None:
        """Return the loads that a ticket is one of. Does not mutate; O(requests)."""
        return next((landing for landing in self._landings.values() if ticket in landing.arriving), None)

    def awaits(self, frontier: Frontier) -> bool:
        """Return whether the block after an entry is being loaded. Does not mutate; O(1)."""
        return bool(self._frontiers) and frontier in self._frontiers

    def num_attempted(self, request: Request) -> int:
        """Return how many leading blocks of a prompt loads have covered. Does not mutate; O(1)."""
        return self._attempted.get(request, 0)

    def arrived(self, request: Request) -> tuple[int, int]:
        """Return the first of the blocks that came from disk for a request, and their end. Does not mutate; O(1)."""
        return self._arrived.get(request, (0, 0))

    def begin(self, request: Request, first: int, reach: int, present: Sequence[int]) -> Landing:
        """Begin loading a prompt's blocks from `first` to `reach`; those present are held meanwhile. Mutates."""
        landing = self._landings[request] = Landing(request, list(present))
        begun = self._arrived.get(request, (first, first))[0]
        self._arrived[request] = begun, begun
        self._attempted[request] = reach
        return landing

    def add(self, landing: Landing, ticket: int, entry: PrefixEntry, group: int, block_id: int) -> None:
        """Add a block that waits for the bytes of an entry. Mutates."""
        landing.arriving[ticket] = entry, group, block_id
        self._frontiers[frontier_of(entry)] += 1
        self._slots.touch(entry)
        self._slots.pin(entry)

    def end_ticket(self, landing: Landing, ticket: int, *, has_arrived: bool) -> None:
        """Publish the block of a ticket if it has arrived and its entry lacks one, and free it otherwise. Mutates."""
        entry, group, block_id = landing.arriving.pop(ticket)
        frontier = frontier_of(entry)
        self._frontiers[frontier] -= 1
        if not self._frontiers[frontier]:
            del self._frontiers[frontier]
        self._slots.unpin(entry)
        if not has_arrived or not entry.attached or entry.block_ids[group] != NO_BLOCK:
            self._pool.free(block_id)
            return
        self._pool.publish(block_id, entry, landing.request, group=group)
        landing.held.append(block_id)

    def end(self, landing: Landing) -> None:
        """End the loads of a request: its blocks become cached, so that the last one is evicted first. Mutates."""
        del self._landings[landing.request]
        begun, _ = self.arrived(landing.request)
        self._arrived[landing.request] = begun, self._attempted.get(landing.request, begun)
        self._pool.free_all(reversed(landing.held))

    def forget(self, request: Request) -> None:
        """Forget what has been loaded for a request without loads, because it runs or has ended. Mutates."""
        self._attempted.pop(request, None)
        self._arrived.pop(request, None)

    def held_blocks(self) -> Iterator[int]:
        """Walk the blocks of the device that loads hold."""
        for landing in self._landings.values():
            yield from landing.held
            yield from (block_id for _, _, block_id in landing.arriving.values())

    def check(self) -> Counter[PrefixEntry]:
        """Return how many loads each entry has; raise `InvariantError` unless slots and frontiers agree with them."""
        frontiers: Counter[Frontier] = Counter()
        pins: Counter[PrefixEntry] = Counter()
        for landing in self._landings.values():
            for entry, group, _ in landing.arriving.values():
                frontiers[frontier_of(entry)] += 1
                pins[entry] += 1
                if self._slots.slot(entry, group) == NO_BLOCK:
                    raise InvariantError("a block is being loaded from a slot that its entry lost")
        if frontiers != self._frontiers:
            raise InvariantError("the blocks being loaded differ from the awaited ones")
        return pins


def frontier_of(entry: PrefixEntry) -> Frontier:
    """Return the frontier at which requests wait for the block of an entry."""
    parent = entry.parent
    if parent is None:
        raise InvariantError("a root has no block")
    return (parent.key if parent.parent is None else parent), entry.key
