"""PrefixIndex: finds the blocks that hold the prefix of a sequence.

An index is a set of **entries**. An entry is one block's worth of tokens *after* everything on the path from its root.
It names the blocks with their keys and values, one per KV group (`NO_BLOCK` if a group has no block).

    root("salt") ── [5 6 7 8] ── [9 9 9 9]          block_ids: one number per KV group
                        └─────── [1 2 3 4]

There are two ways to walk the same set: `HashChainIndex` finds the next entry by the chained hash of its tokens, and
`RadixTreeIndex` compares whole spans of a compressed tree. Both check the parent **entry**, not only its hash, and
compare the tokens. So by induction from the root a match is exact: a wrong hit is impossible, not only improbable.

An entry exists while it has a block in some group, or children. Reference counts and holders are the pool's business,
not the index's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from quire.core.errors import InvariantError
from quire.core.step import NO_BLOCK
from quire.memory.block_hash import BlockHasher


class KeptSlots:
    """Where the blocks of an entry are on disk. Mutated only by `SlotBooks`."""

    __slots__ = ("serial", "slots", "num_children", "num_pins", "used_at")

    def __init__(self, serial: int, num_groups: int) -> None:
        self.serial = serial  # names the entry on disk; never changes, because its children refer to it
        self.slots = [NO_BLOCK] * num_groups
        self.num_children = 0  # entries after this one that have slots
        self.num_pins = 0  # transfers in flight
        self.used_at = 0


class PrefixEntry:
    """One block's worth of tokens after its parent. Mutated by its index (links) and the manager (`block_ids`)."""

    __slots__ = ("parent", "key", "block_ids", "host_ids", "num_children", "attached", "digest", "kept")

    def __init__(self, parent: PrefixEntry | None, key: bytes, num_groups: int) -> None:
        self.parent = parent
        self.key = key  # the packed tokens; of a root, the salt and extra keys
        self.block_ids = [NO_BLOCK] * num_groups
        self.host_ids: list[int] | None = None  # its blocks on the host; None: it never had any
        self.num_children = 0
        self.attached = True  # False once it was dropped from the index
        self.digest = b""  # chained hash of the path; an index that does not need it leaves it to `digest_of`
        self.kept: KeptSlots | None = None  # its slots on disk; None: it never had any

    @property
    def holds_blocks(self) -> bool:
        """Whether some group has a block for these tokens, on the device, on the host or on disk."""
        if max(self.block_ids) >= 0 or (self.host_ids is not None and max(self.host_ids) >= 0):
            return True
        return self.kept is not None and max(self.kept.slots) >= 0


class PrefixIndex(Protocol):
    """Finds and keeps entries. All keys of blocks are packed tokens of the same length."""

    keeps_entries: bool
    """False if the index never keeps entries, so that no request waits for one."""

    def match(self, root: bytes, tokens: bytes) -> list[PrefixEntry]:
        """Return the entries along `tokens`, from the first block on, as far as they go. Does not mutate."""
        ...

    def root(self, root: bytes) -> PrefixEntry:
        """Return the root of a salt and its extra keys, created if missing. Mutates."""
        ...

    def extend(self, parent: PrefixEntry, tokens: bytes) -> PrefixEntry | None:
        """Return the entry of one block after `parent`, created if missing; None if `parent` was dropped. Mutates."""
        ...

    def discard(self, entry: PrefixEntry) -> None:
        """Drop the entry if it has neither blocks nor children, and then its parents likewise. Mutates."""
        ...

    def roots_beginning_with(self, tokens: bytes) -> list[bytes]:
        """Return the roots (not many) that have an entry for this first block. Does not mutate."""
        ...

    def clear(self) -> None:
        """Drop everything. Mutates."""
        ...

    def __len__(self) -> int:
        """Return the number of entries, roots not counted."""
        ...

    def __iter__(self) -> Iterator[PrefixEntry]:
        """Walk all entries, roots not included."""
        ...

    def check(self) -> None:
        """Raise `InvariantError` unless the structure is sound."""
        ...


def digest_of(entry: PrefixEntry, hasher: BlockHasher) -> bytes:
    """Return the chained hash of an entry; computes and stores the missing hashes on its path."""
    missing = []
    step: PrefixEntry | None = entry
    while step is not None and not step.digest:
        missing.append(step)
        step = step.parent
    digest = step.digest if step is not None else b""
    for step in reversed(missing):
        digest = hasher.child(digest, step.key)
        step.digest = digest
    return digest


def check_entry(entry: PrefixEntry, num_children: int) -> None:
    """Raise `InvariantError` unless an entry of an index is attached and counts its children correctly."""
    if not entry.attached:
        raise InvariantError("an index holds an entry that was dropped")
    if entry.num_children != num_children:
        raise InvariantError(f"an entry counts {entry.num_children} children and has {num_children}")
