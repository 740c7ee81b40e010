"""SlotBooks: assigns the slots of the disk to entries, and evicts entries when all slots are taken.

    slots    kept or being written + free + never used + bad = num_slots

**Leaf first**: an entry whose children are on disk is not evicted, because they could not be hit without it. Among the
leaves, the one used longest ago is evicted. The order is a heap that also has outdated items; they are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from quire.core.errors import InvariantError
from quire.core.step import NO_BLOCK
from quire.memory.prefix.base import KeptSlots, PrefixEntry


class SlotBooks:
    """The slots of a disk, by their numbers.

    >>> books, root = SlotBooks(2, num_groups=1), PrefixEntry(None, b"root", 1)
    >>> a, b = PrefixEntry(root, b"a", 1), PrefixEntry(root, b"b", 1)
    >>> for entry in (a, b): books.hold(entry, 0, books.take((), []))
    >>> books.touch(a); books.take((), []), b.kept.slots
    (1, [-1])
    """

    def __init__(self, num_slots: int, num_groups: int) -> None:
        self.num_slots = num_slots
        self.num_bad = 0
        self.last_serial = 0
        self._num_groups = num_groups
        self._num_opened = 0  # slots from here on were never used
        self._free: list[int] = []
        self._holders: dict[int, tuple[PrefixEntry, int]] = {}
        self._leaves: list[tuple[int, int, PrefixEntry]] = []  # used at, serial, entry
        self._now = 0

    @property
    def num_held(self) -> int:
        """Slots that hold the block of an entry."""
        return len(self._holders)

    @property
    def free_slots(self) -> Sequence[int]:
        """Slots that were used and hold no block now."""
        return self._free

    def slot(self, entry: PrefixEntry, group: int) -> int:
        """Return the slot of an entry's block in a group, or `NO_BLOCK`. O(1)."""
        return NO_BLOCK if entry.kept is None else entry.kept.slots[group]

    def serial(self, entry: PrefixEntry) -> int:
        """Return the number that names an entry on disk, lower than those of its children; 0 for a root. Mutates."""
        if entry.parent is None:
            return 0
        if entry.kept is None:
            self.serial(entry.parent)
            self.last_serial += 1
            entry.kept = KeptSlots(self.last_serial, self._num_groups)
        return entry.kept.serial

    def take(self, spared: Collection[PrefixEntry], evicted: list[PrefixEntry]) -> int | None:
        """Return an unused slot, evicting an entry that is not `spared` if necessary. Mutates.

        An entry that lost its slots is added to `evicted`. None if no slot is unused and no entry can be evicted.
        """
        if self._free:
            return self._free.pop()
        if self._num_opened < self.num_slots:
            self._num_opened += 1
            return self._num_opened - 1
        entry = self._next_leaf(spared)
        if entry is None:
            return None
        for group in range(self._num_groups):
            self.release(entry, group)
        evicted.append(entry)
        return self._free.pop()

    def _next_leaf(self, spared: Collection[PrefixEntry]) -> PrefixEntry | None:
        passed_over = []
        victim = None
        while self._leaves and victim is None:
            leaf = heapq.heappop(self._leaves)
            entry = leaf[2]
            kept = _slots_of_leaf(entry)
            if kept is None or kept.used_at != leaf[0]:
                continue
            if entry in spared:
                passed_over.append(leaf)
            else:
                victim = entry
        for leaf in passed_over:
            heapq.heappush(self._leaves, leaf)
        return victim

    def hold(self, entry: PrefixEntry, group: int, slot: int) -> None:
        """Note that a slot holds an entry's block. Mutates."""
        self.serial(entry)
        kept, parent = entry.kept, entry.parent
        if kept is None or parent is None or kept.slots[group] != NO_BLOCK or slot in self._holders:
            raise InvariantError(f"slot {slot} cannot be held: it is taken, or the entry has another")
        if max(kept.slots) < 0 and parent.kept is not None:
            parent.kept.num_children += 1
        kept.slots[group] = slot
        self._holders[slot] = entry, group
        self.touch(entry)

    def release(self, entry: PrefixEntry, group: int, *, is_bad: bool = False) -> int:
        """Take an entry's slot in a group away; it is free then, or bad. Returns it, or `NO_BLOCK`. Mutates."""
        kept = entry.kept
        if kept is None or kept.slots[group] == NO_BLOCK:
            return NO_BLOCK
        slot, kept.slots[group] = kept.slots[group], NO_BLOCK
        del self._holders[slot]
        if is_bad:
            self.num_bad += 1
        else:
            self._free.append(slot)
        parent = entry.parent
        if max(kept.slots) < 0 and parent is not None and parent.kept is not None:
            parent.kept.num_children -= 1
            self._note_leaf(parent)
        return slot

    def touch(self, entry: PrefixEntry) -> None:
        """Note that an entry is used now. Mutates."""
        if entry.kept is not None:
            self._now += 1
            entry.kept.used_at = self._now
            self._note_leaf(entry)

    def pin(self, entry: PrefixEntry) -> None:
        """Keep an entry while it is read or written. Mutates."""
        if entry.kept is not None:
            entry.kept.num_pins += 1

    def unpin(self, entry: PrefixEntry) -> None:
        """Let an entry be evicted again. Mutates."""
        if entry.kept is not None:
            entry.kept.num_pins -= 1
            self._note_leaf(entry)

    def freeze(self) -> None:
        """Open no more slots, because the disk is full. Mutates."""
        self.num_slots = self._num_opened

    def open_all(self, num_opened: int) -> None:
        """Note that slots below `num_opened` have been used before; those that hold no block are free. Mutates."""
        self._num_opened = num_opened
        self._free = [slot for slot in range(num_opened) if slot not in self._holders]

    def entries(self) -> dict[PrefixEntry, None]:
        """Return the entries that hold slots, each once. Does not mutate; O(slots)."""
        return dict.fromkeys(entry for entry, _ in self._holders.values())

    def _note_leaf(self, entry: PrefixEntry) -> None:
        kept = _slots_of_leaf(entry)
        if kept is None:
            return
        heapq.heappush(self._leaves, (kept.used_at, kept.serial, entry))
        if len(self._leaves) > 64 + 4 * len(self._holders):
            leaves = ((_slots_of_leaf(each), each) for each in self.entries())
            self._leaves = [(kept.used_at, kept.serial, each) for kept, each in leaves if kept is not None]
            heapq.heapify(self._leaves)

    def check(self) -> None:
        """Raise `InvariantError` unless every slot is accounted for once, and parents know their children."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._holders.keys():
            raise InvariantError("a slot is free twice, or free and taken")
        if len(free) + len(self._holders) + self.num_bad != self._num_opened or self._num_opened > self.num_slots:
            raise InvariantError("free, taken and bad slots do not add up to those in use")
        children: dict[PrefixEntry, set[PrefixEntry]] = {}
        for slot, (entry, group) in self._holders.items():
            if entry.kept is None or entry.kept.slots[group] != slot or not entry.attached or entry.parent is None:
                raise InvariantError(f"slot {slot} is not that of its entry")
            children.setdefault(entry.parent, set()).add(entry)
        for parent, entries in children.items():
            if parent.parent is not None and (parent.kept is None or parent.kept.num_children != len(entries)):
                raise InvariantError("an entry miscounts its children on disk")


def _slots_of_leaf(entry: PrefixEntry) -> KeptSlots | None:
    """Return the slots of an entry that can be evicted; None if it cannot be."""
    kept = entry.kept
    if kept is None or kept.num_children or kept.num_pins or max(kept.slots) < 0:
        return None
    return kept
