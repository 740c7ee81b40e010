"""The journal of the memory, by hand: parents that change while what changed is not taken yet.

`support.block_picture` compares it with a scan, in every state that the memory gets into (`test_memory_machine.py`).
"""

from __future__ import annotations

from quire.core.step import NO_BLOCK
from quire.memory.block_pool import BlockPool
from quire.memory.eviction.lru import LRUEviction
from quire.memory.journal import MemoryJournal
from quire.memory.prefix.base import PrefixEntry

PARENT, CHILD = 0, 1
"""Blocks, and what they hold: the tokens of `Tree.parent`, and those of `Tree.child` behind them."""


class Tree:
    """Two blocks of two entries, one after the other, and what a watcher knows of them."""

    def __init__(self) -> None:
        self.pool = BlockPool(2, LRUEviction(), on_evict=lambda block: None)
        self.journal = MemoryJournal(self.pool, {})
        root = PrefixEntry(None, b"", 1)
        self.parent = PrefixEntry(root, b"one", 1)
        self.child = PrefixEntry(self.parent, b"two", 1)
        self.told: dict[int, int] = {}

    def put(self, block_id: int, entry: PrefixEntry) -> None:
        self.pool.blocks[block_id].entry, entry.block_ids[0] = entry, block_id
        self.touch(block_id)

    def drop(self, block_id: int, entry: PrefixEntry) -> None:
        self.pool.blocks[block_id].entry, entry.block_ids[0] = None, NO_BLOCK
        self.touch(block_id)

    def touch(self, block_id: int) -> None:
        self.journal.touched.add(block_id)
        self.journal.stamp(0.0)

    def take(self, most: int = 9) -> None:
        self.told |= {change.block_id: change.parent for change in self.journal.take(most)}


def test_a_parent_that_went_and_came_back_is_still_the_parent() -> None:
    tree = Tree()
    tree.put(PARENT, tree.parent)
    tree.put(CHILD, tree.child)
    tree.take()
    assert tree.told == {PARENT: NO_BLOCK, CHILD: PARENT}
    tree.touch(CHILD)
    tree.drop(PARENT, tree.parent)
    tree.take(most=1)  # of the child, while the parent is gone
    tree.put(PARENT, tree.parent)
    tree.take()
    assert tree.told[CHILD] == PARENT


def test_a_parent_that_came_and_went_untold_is_none() -> None:
    tree = Tree()
    tree.put(CHILD, tree.child)
    tree.put(PARENT, tree.parent)
    tree.take(most=1)  # of the child, while the parent is there
    tree.drop(PARENT, tree.parent)
    tree.take()
    assert tree.told[CHILD] == NO_BLOCK


def test_another_block_in_the_place_of_the_parent_is_the_parent() -> None:
    tree = Tree()
    tree.pool = BlockPool(3, LRUEviction(), on_evict=lambda block: None)
    tree.journal = MemoryJournal(tree.pool, {})
    tree.put(PARENT, tree.parent)
    tree.put(CHILD, tree.child)
    tree.take()
    tree.pool.blocks[PARENT].entry = None
    tree.put(2, tree.parent)
    tree.touch(PARENT)
    for _ in range(2):
        tree.take(most=1)
        assert tree.told[CHILD] == 2
    tree.drop(2, tree.parent)
    tree.put(PARENT, tree.parent)
    for _ in range(2):
        tree.take(most=1)
    assert tree.told[CHILD] == PARENT
