"""NoPrefixIndex: the index while prefix caching is off."""

from __future__ import annotations

from collections.abc import Iterator

from quire.memory.prefix.base import PrefixEntry


class NoPrefixIndex:
    """Finds nothing and keeps nothing, so no block is ever published."""

    keeps_entries = False

    def __init__(self, num_groups: int) -> None:
        self._num_groups = num_groups

    def match(self, root: bytes, tokens: bytes) -> list[PrefixEntry]:
        """Return no entries. Does not mutate."""
        return []

    def root(self, root: bytes) -> PrefixEntry:
        """Return a root that cannot have children."""
        entry = PrefixEntry(None, root, self._num_groups)
        entry.attached = False
        return entry

    def extend(self, parent: PrefixEntry, tokens: bytes) -> PrefixEntry | None:
        """Return None. Does not mutate."""
        return None

    def discard(self, entry: PrefixEntry) -> None:
        """Do nothing. Does not mutate."""

    def roots_beginning_with(self, tokens: bytes) -> list[bytes]:
        """Return no roots. Does not mutate."""
        return []

    def clear(self) -> None:
        """Do nothing. Does not mutate."""

    def __len__(self) -> int:
        """Return 0."""
        return 0

    def __iter__(self) -> Iterator[PrefixEntry]:
        """Walk no entries."""
        return iter(())

    def check(self) -> None:
        """Do nothing."""
