"""Which decodes begin with the same blocks, so that the keys and values in them need be read once for all.

    sequence 0   7  3  9  4 │ 11        the first 4 blocks are the same memory: a prompt that was cached, or forked.
    sequence 1   7  3  9  4 │ 12        Tasks of its splits take the tokens of all three sequences as their rows, and
    sequence 2   7  3  9  4 │ 20 21     each sequence does the rest by itself.

Only whole splits are shared. So a row's splits, and their order, are those that it has alone, and sharing changes no
bit (a part of a row does not depend on the other rows of its product). Found anew in every step from the block tables,
which are the truth about what is shared: no engine has to say so, and one prefix among others is found as well.
Rejected: prefixes of prefixes (a level for each would be one more part for each row).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import IntArray

MIN_TILES: Final = 4


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Tiles that begin with the same splits: by index, and how many splits."""

    tiles: IntArray
    num_splits: int


def shared_prefixes(tables: IntArray, lengths: IntArray, block_size: int, split: int) -> list[SharedPrefix]:
    """Return the prefixes of at least a split that four or more decodes share. Does not mutate.

    `tables` and `lengths` are those of the decodes. Where nothing is shared it looks at first blocks only.

    >>> tables = np.array([[7, 3, 9], [7, 3, 8], [5, 3, 1], [7, 3, 4], [7, 3, 2]])
    >>> [found] = shared_prefixes(tables, np.array([40, 48, 48, 33, 35]), block_size=16, split=16)
    >>> found.tiles.tolist(), found.num_splits
    ([0, 1, 3, 4], 2)
    """
    num_blocks = split // block_size
    long = np.flatnonzero(lengths >= split)
    first = np.sort(tables[long, 0])
    if not np.any(first[MIN_TILES - 1 :] == first[: max(0, len(first) - MIN_TILES + 1)]):
        return []
    groups: dict[bytes, list[int]] = {}
    for row, blocks in zip(long.tolist(), tables[long, :num_blocks], strict=True):
        groups.setdefault(blocks.tobytes(), []).append(row)
    found = []
    for rows in groups.values():
        if len(rows) < MIN_TILES:
            continue
        tiles = np.array(rows)
        shared = int(lengths[tiles].min()) // split
        common = np.all(tables[tiles] == tables[tiles[0]], axis=0)[: shared * num_blocks]
        same = int(np.argmin(common)) if not common.all() else len(common)
        found.append(SharedPrefix(tiles, same // num_blocks))
    return found
