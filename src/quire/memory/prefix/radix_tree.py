"""RadixTreeIndex: a compressed tree over the tokens themselves.

This is SGLang's way, at block granularity: a node holds a **span** of consecutive entries, so a long prefix without
branches is one comparison of bytes, without any hash. If two sequences diverge inside a span, it is split.

    before                      after extend(entry of "bb", "xx")
    ┌ aa bb cc dd ┐             ┌ aa bb ┐ ──┬── ┌ cc dd ┐
                                            └── ┌ xx ┐

Children are found by the tokens of their first block. A span grows in place while its last entry has no other
successor. A split moves the lower part into a new node and keeps the entries, so that references from sequences and
blocks stay valid.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.core.errors import InvariantError
from quire.memory.prefix.base import PrefixEntry, check_entry


class RadixNode:
    """A span of entries and the nodes after it."""

    __slots__ = ("parent", "span", "entries", "children")

    def __init__(self, parent: RadixNode | None) -> None:
        self.parent = parent
        self.span = bytearray()  # the keys of the entries, one after another
        self.entries: list[RadixEntry] = []
        self.children: dict[bytes, RadixNode] = {}


class RadixEntry(PrefixEntry):
    """An entry that knows its node and its place in the span (-1: the root itself)."""

    __slots__ = ("node", "place")

    def __init__(self, parent: PrefixEntry | None, key: bytes, num_groups: int, node: RadixNode, place: int) -> None:
        super().__init__(parent, key, num_groups)
        self.node = node
        self.place = place


class RadixTreeIndex:
    """Prefix index over a radix tree: one comparison per span.

    >>> index = RadixTreeIndex(block_bytes=2, num_groups=1)
    >>> first = index.extend(index.root(b""), b"aa"); second = index.extend(first, b"bb")
    >>> third = index.extend(first, b"xx")
    >>> index.match(b"", b"aabb..") == [first, second], index.match(b"", b"aaxx") == [first, third]
    (True, True)
    """

    keeps_entries = True

    def __init__(self, block_bytes: int, num_groups: int) -> None:
        self._block_bytes = block_bytes
        self._num_groups = num_groups
        self._roots: dict[bytes, RadixEntry] = {}
        self._length = 0

    def match(self, root: bytes, tokens: bytes) -> list[PrefixEntry]:
        """Return the entries along `tokens` as far as they go. Does not mutate; O(spans) comparisons of bytes."""
        matched: list[PrefixEntry] = []
        start = self._roots.get(root)
        if start is None:
            return matched
        size, node, at = self._block_bytes, start.node, 0
        while at + size <= len(tokens):
            child = node.children.get(tokens[at : at + size])
            if child is None:
                break
            same = self._common_blocks(child, tokens, at)
            matched += child.entries[:same]
            at += same * size
            if same < len(child.entries):
                break
            node = child
        return matched

    def _common_blocks(self, node: RadixNode, tokens: bytes, at: int) -> int:
        """Return how many leading blocks of the span equal the tokens from `at` on; the first is known to be equal."""
        size = self._block_bytes
        low, high = 1, min(len(node.entries), (len(tokens) - at) // size)
        if node.span[: high * size] == tokens[at : at + high * size]:
            return high
        while high - low > 1:
            middle = (low + high) // 2
            if node.span[low * size : middle * size] == tokens[at + low * size : at + middle * size]:
                low = middle
            else:
                high = middle
        return low

    def root(self, root: bytes) -> PrefixEntry:
        """Return the root of a salt and its extra keys, created if missing. Mutates; O(1)."""
        entry = self._roots.get(root)
        if entry is None:
            entry = self._roots[root] = RadixEntry(None, root, self._num_groups, RadixNode(None), -1)
        return entry

    def extend(self, parent: PrefixEntry, tokens: bytes) -> PrefixEntry | None:
        """Return the entry after `parent`, created if missing; None if `parent` was dropped.

        Mutates. O(1), or O(rest of the span) if the span is split.
        """
        if not isinstance(parent, RadixEntry):
            raise InvariantError("the parent belongs to another index")
        if not parent.attached:
            return None
        node, place = parent.node, parent.place + 1
        if place < len(node.entries):
            if node.entries[place].key == tokens:
                return node.entries[place]
            self._split(node, place)
        elif tokens in node.children:
            return node.children[tokens].entries[0]
        if node.children or node.parent is None:
            node.children[tokens] = child = RadixNode(node)
            node, place = child, 0
        entry = RadixEntry(parent, tokens, self._num_groups, node, place)
        node.entries.append(entry)
        node.span += tokens
        parent.num_children += 1
        self._length += 1
        return entry

    def _split(self, node: RadixNode, place: int) -> None:
        """Move the entries from `place` on into a node of their own."""
        cut = place * self._block_bytes
        lower = RadixNode(node)
        lower.span, node.span = node.span[cut:], node.span[:cut]
        lower.entries, node.entries = node.entries[place:], node.entries[:place]
        lower.children, node.children = node.children, {lower.entries[0].key: lower}
        for child in lower.children.values():
            child.parent = lower
        for index, entry in enumerate(lower.entries):
            entry.node = lower
            entry.place = index

    def discard(self, entry: PrefixEntry) -> None:
        """Drop the entry if nothing needs it, then its parents likewise. Mutates; O(entries dropped)."""
        step: PrefixEntry | None = entry
        while step is not None and step.attached and not step.num_children and not step.holds_blocks:
            step.attached = False
            if not isinstance(step, RadixEntry) or step.parent is None:
                del self._roots[step.key]
                return
            node = step.node
            node.entries.pop()
            del node.span[-self._block_bytes :]
            if not node.entries and node.parent is not None:
                del node.parent.children[step.key]
            step.parent.num_children -= 1
            self._length -= 1
            step = step.parent

    def roots_beginning_with(self, tokens: bytes) -> list[bytes]:
        """Return the roots that have an entry for this first block. Does not mutate; O(roots)."""
        return [key for key, root in self._roots.items() if tokens in root.node.children]

    def clear(self) -> None:
        """Drop everything. Mutates; O(n)."""
        for entry in [*self, *self._roots.values()]:
            entry.attached = False
        self._roots.clear()
        self._length = 0

    def __len__(self) -> int:
        """Return the number of entries. O(1)."""
        return self._length

    def __iter__(self) -> Iterator[PrefixEntry]:
        """Walk all entries."""
        for node in self.nodes():
            yield from node.entries

    def nodes(self) -> Iterator[RadixNode]:
        """Walk all nodes, parents first, including the roots, whose spans are empty."""
        pending = [root.node for root in self._roots.values()]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())

    def check(self) -> None:
        """Raise `InvariantError` unless spans, links and counts agree."""
        length = 0
        for node in self.nodes():
            if bytes(node.span) != b"".join(entry.key for entry in node.entries):
                raise InvariantError("a span does not hold the tokens of its entries")
            for place, entry in enumerate(node.entries):
                last = place == len(node.entries) - 1
                check_entry(entry, len(node.children) if last else 1)
                if entry.node is not node or entry.place != place:
                    raise InvariantError("an entry remembers a wrong place")
            for key, child in node.children.items():
                if not child.entries:
                    raise InvariantError("a node without entries was kept")
                if child.parent is not node or child.entries[0].key != key:
                    raise InvariantError("a node is filed under tokens that are not its own")
            length += len(node.entries)
        for root in self._roots.values():
            check_entry(root, len(root.node.children))
        if length != self._length:
            raise InvariantError(f"the index counts {self._length} entries and has {length}")
