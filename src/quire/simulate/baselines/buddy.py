"""BuddyAllocator: contiguous memory in powers of two, which the paper assumes for Orca.

    16 │■■■■■■■■│████│██│··│        a run of 16 was halved three times: 8, 4 and 2 are taken, 2 are free

A request takes the smallest run that holds it, halving a larger one if necessary; a freed run merges with the other
half, its buddy, if that is free too. The slots of a run that the request does not need are wasted, and so are free runs
of the wrong size. Paging avoids both.
"""

from __future__ import annotations

from quire.core.errors import InvariantError
from quire.core.setting_checks import require_int


class BuddyAllocator:
    """Runs of slots. If the total is not a power of two, it consists of runs of falling size, which never merge.

    >>> buddy = BuddyAllocator(24)
    >>> buddy.allocate(5), buddy.allocate(8), buddy.allocate(3), buddy.allocate(8), buddy.num_free
    (16, 0, 8, None, 4)
    """

    def __init__(self, num_slots: int) -> None:
        require_int("num_slots", num_slots, 1, 1 << 40)
        self.num_slots = num_slots
        self.num_free = num_slots
        self._free: dict[int, set[int]] = {1 << order: set() for order in range(num_slots.bit_length())}
        self._taken: dict[int, int] = {}
        start = 0
        for order in range(num_slots.bit_length() - 1, -1, -1):
            if num_slots >> order & 1:
                self._free[1 << order].add(start)
                start += 1 << order

    def allocate(self, num_slots: int) -> int | None:
        """Take a run of at least this many slots; return its start, or None if there is none. Mutates; O(log slots)."""
        size = run_size(num_slots)
        found = size
        while not self._free.get(found):
            found *= 2
            if found > self.num_slots:
                return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > size:
            found //= 2
            self._free[found].add(start + found)
        self._taken[start] = size
        self.num_free -= size
        return start

    def free(self, start: int) -> None:
        """Free a run, and merge it with its buddy as long as that is free. Mutates; O(log slots)."""
        size = self._taken.pop(start, 0)
        if not size:
            raise InvariantError(f"no run begins at {start}")
        self.num_free += size
        while start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free[size].add(start)

    def check(self) -> None:
        """Raise `InvariantError` unless free and taken runs cover all slots once, and no two buddies are free."""
        runs = sorted([*self._taken.items(), *((start, size) for size in self._free for start in self._free[size])])
        end = 0
        for start, size in runs:
            if start != end or start % size:
                raise InvariantError(f"a run of {size} begins at {start}, after {end}")
            end += size
        if end != self.num_slots or sum(size * len(self._free[size]) for size in self._free) != self.num_free:
            raise InvariantError(f"the runs cover {end} of {self.num_slots} slots")
        for size, starts in self._free.items():
            if any(start ^ size in starts for start in starts):
                raise InvariantError(f"two free buddies of {size} were not merged")


def run_size(num_slots: int) -> int:
    """Return the smallest power of two that holds this many slots.

    >>> run_size(1), run_size(5), run_size(8)
    (1, 8, 8)
    """
    return 1 << (num_slots - 1).bit_length()
