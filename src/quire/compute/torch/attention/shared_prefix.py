"""Finds decodes that begin with the same blocks, so that the keys and values there are read once for all of them.

    sequence 0   7  3  9  4 │ 11        the first 4 blocks are the same memory: a cached or forked prompt. The tasks
    sequence 1   7  3  9  4 │ 12        of its splits have the tokens of all three sequences as rows, and each
    sequence 2   7  3  9  4 │ 20 21     sequence computes the rest alone.

Only whole splits are shared. So a row has the same splits in the same order as without sharing, and sharing changes no
bit (a part of a row does not depend on the other rows of its product). Prefixes are found again in every step from the
block tables, which always show the shared blocks. So no engine has to declare prefixes, and a step can have several.
Rejected: prefixes of prefixes (each level would add a part to each row).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import IntArray

MIN_TILES: Final = 4


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Tiles, by index, that begin with the same splits, and the number of those splits."""

    tiles: IntArray
    num_splits: int


def shared_prefixes(
    tables: IntArray, lengths: IntArray, block_size: int, split: int, rows: IntArray | None = None
) -> list[SharedPrefix]:
    """Return the prefixes of at least a split that four or more tiles share. Does not mutate.

    `lengths` and `rows` of `tables` (None: all) belong to tiles of one token. If nothing is shared, only the first
    blocks are read.

    >>> tables = np.array([[7, 3, 9], [7, 3, 8], [5, 3, 1], [7, 3, 4], [7, 3, 2]])
    >>> [prefix] = shared_prefixes(tables, np.array([40, 48, 48, 33, 35]), block_size=16, split=16)
    >>> prefix.tiles.tolist(), prefix.num_splits
    ([0, 1, 3, 4], 2)
    """
    num_blocks = split // block_size
    long = np.flatnonzero(lengths >= split)
    rows = np.arange(len(tables)) if rows is None else rows
    first = np.sort(tables[rows[long], 0])
    if not np.any(first[MIN_TILES - 1 :] == first[: max(0, len(first) - MIN_TILES + 1)]):
        return []
    groups: dict[bytes, list[int]] = {}
    for tile, blocks in zip(long.tolist(), tables[rows[long], :num_blocks], strict=True):
        groups.setdefault(blocks.tobytes(), []).append(tile)
    prefixes = []
    for group in groups.values():
        if len(group) < MIN_TILES:
            continue
        tiles = np.array(group)
        shared = int(lengths[tiles].min()) // split
        blocks = tables[rows[tiles], : shared * num_blocks]
        common = np.all(blocks == blocks[0], axis=0)
        same = int(np.argmin(common)) if not common.all() else len(common)
        prefixes.append(SharedPrefix(tiles, same // num_blocks))
    return prefixes
