"""HashChainIndex: a dictionary from chained hash to entry.

This is the common way (vLLM, nano-vllm), with two additions: the candidate's parent must be the previously matched
entry, and its tokens are compared. So two entries may share a hash (they are chained in `same_hash`), and the width of
the hash affects only speed, not correctness.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.errors import InvariantError
from quire.memory.block_hash import BlockHasher
from quire.memory.prefix.base import PrefixEntry, check_entry


class HashEntry(PrefixEntry):
    """An entry that can be in a chain of equal hashes."""

    __slots__ = ("same_hash",)

    same_hash: HashEntry | None


class HashChainIndex:
    """Prefix index over chained hashes: O(1) per block, with one hash of the block's tokens.

    >>> index = HashChainIndex(block_bytes=8, num_groups=1, hasher=BlockHasher())
    >>> entry = index.extend(index.root(b"salt"), b"8 bytes.")
    >>> index.match(b"salt", b"8 bytes.other...") == [entry], index.match(b"", b"8 bytes.")
    (True, [])
    """

    keeps_entries = True

    def __init__(self, block_bytes: int, num_groups: int, hasher: BlockHasher) -> None:
        self._block_bytes = block_bytes
        self._num_groups = num_groups
        self._hasher = hasher
        self._roots: dict[bytes, HashEntry] = {}
        self._entries: dict[bytes, HashEntry] = {}
        self._first_blocks: dict[bytes, dict[bytes, None]] = {}
        self._length = 0

    def match(self, root: bytes, tokens: bytes) -> list[PrefixEntry]:
        """Return the entries along `tokens` as far as they go. Does not mutate; O(number of blocks matched)."""
        matched: list[PrefixEntry] = []
        parent = self._roots.get(root)
        if parent is None:
            return matched
        size, entries, child = self._block_bytes, self._entries, self._hasher.child
        for at in range(0, len(tokens) - size + 1, size):
            key = tokens[at : at + size]
            entry = entries.get(child(parent.digest, key))
            while entry is not None and (entry.parent is not parent or entry.key != key):
                entry = entry.same_hash
            if entry is None:
                break
            matched.append(entry)
            parent = entry
        return matched

    def root(self, root: bytes) -> PrefixEntry:
        """Return the root of a salt and its extra keys, created if missing. Mutates; O(1)."""
        entry = self._roots.get(root)
        if entry is None:
            entry = self._roots[root] = self._make(None, root, self._hasher.root(root), None)
        return entry

    def _make(self, parent: PrefixEntry | None, key: bytes, digest: bytes, same_hash: HashEntry | None) -> HashEntry:
        entry = HashEntry(parent, key, self._num_groups)
        entry.digest = digest
        entry.same_hash = same_hash
        return entry

    def extend(self, parent: PrefixEntry, tokens: bytes) -> PrefixEntry | None:
        """Return the entry after `parent`, created if missing; None if `parent` was dropped. Mutates; O(1)."""
        if not parent.attached:
            return None
        digest = self._hasher.child(parent.digest, tokens)
        first = entry = self._entries.get(digest)
        while entry is not None:
            if entry.parent is parent and entry.key == tokens:
                return entry
            entry = entry.same_hash
        entry = self._entries[digest] = self._make(parent, tokens, digest, first)
        parent.num_children += 1
        if parent.parent is None:
            self._first_blocks.setdefault(tokens, {})[parent.key] = None
        self._length += 1
        return entry

    def discard(self, entry: PrefixEntry) -> None:
        """Drop the entry if nothing needs it, then its parents likewise. Mutates; O(entries dropped)."""
        step: PrefixEntry | None = entry
        while step is not None and step.attached and not step.num_children and not step.holds_blocks:
            step.attached = False
            if step.parent is None:
                del self._roots[step.key]
                return
            self._unlink(step)
            step.parent.num_children -= 1
            if step.parent.parent is None:
                roots = self._first_blocks[step.key]
                del roots[step.parent.key]
                if not roots:
                    del self._first_blocks[step.key]
            self._length -= 1
            step = step.parent

    def _unlink(self, entry: PrefixEntry) -> None:
        candidate = self._entries[entry.digest]
        if candidate is entry:
            if candidate.same_hash is None:
                del self._entries[entry.digest]
            else:
                self._entries[entry.digest] = candidate.same_hash
            return
        while candidate.same_hash is not entry:
            if candidate.same_hash is None:
                raise InvariantError("an entry is missing from the chain of its hash")
            candidate = candidate.same_hash
        candidate.same_hash = candidate.same_hash.same_hash

    def roots_beginning_with(self, tokens: bytes) -> list[bytes]:
        """Return the roots that have an entry for this first block. Does not mutate."""
        return list(self._first_blocks.get(tokens, ()))

    def clear(self) -> None:
        """Drop everything. Mutates; O(n)."""
        for entry in self:
            entry.attached = False
        for root in self._roots.values():
            root.attached = False
        self._roots.clear()
        self._entries.clear()
        self._first_blocks.clear()
        self._length = 0

    def __len__(self) -> int:
        """Return the number of entries. O(1)."""
        return self._length

    def __iter__(self) -> Iterator[PrefixEntry]:
        """Walk all entries."""
        for first in self._entries.values():
            entry: HashEntry | None = first
            while entry is not None:
                yield entry
                entry = entry.same_hash

    def check(self) -> None:
        """Raise `InvariantError` unless hashes, parents and counts agree."""
        children: dict[PrefixEntry, int] = {}
        for entry in self:
            if entry.parent is None or not entry.parent.attached:
                raise InvariantError("an entry has no parent in the index")
            if entry.digest != self._hasher.child(entry.parent.digest, entry.key):
                raise InvariantError("an entry is filed under a hash that is not its own")
            children[entry.parent] = children.get(entry.parent, 0) + 1
        for entry in [*self, *self._roots.values()]:
            check_entry(entry, children.get(entry, 0))
        if sum(children.values()) != self._length:
            raise InvariantError(f"the index counts {self._length} entries and has {sum(children.values())}")
