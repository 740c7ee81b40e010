"""Work lists: which program attends with which tokens, to which positions. Made on the host, once per step.

    tile        consecutive tokens of a sequence that fit into the rows of a program
    split       512 positions, or 256 of decodes, fixed; a row's sums are made of splits
    task        a tile and a span of positions: all splits of the tile (whole), or one of them (cut)
    part        the result of one task for one token; merged in ascending order

    sequence 0, 300 tokens    whole    ├────────┤                          no parts, no merge
    sequence 1, 1,900 tokens  cut      ├──────┤ ├──────┤ ├──────┤ ├───┤    parts 0, 1, 2, 3, merged
    sequence 2, 700 tokens    whole    ├──────┤─┤                          folded as it goes

Cutting spreads a long sequence over many processors; not cutting saves writing and merging parts. Both give the same
bits (`kernels.merge`), so the choice can depend on the whole batch: a tile is cut if it is more than a processor's
share of the work. Long tasks are first in the list, so that the short ones fill the gaps at the end. Launches run one
after another and reuse the memory for parts: cut tiles with too many parts for one launch are spread over several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

import numpy as np

from quire.compute.arrays import BoolArray, IntArray
from quire.compute.torch.attention.shared_prefix import SharedPrefix
from quire.compute.torch.kernels.tile_shape import SPLIT

MOST_PARTS: Final = 8192
"""The most parts of a launch's cut long tiles, unless one tile has more; 136 MB for 32 heads of 128 numbers."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Consecutive tokens of a sequence, at consecutive positions: columns of `[num_tiles]`."""

    sequences: IntArray
    tokens: IntArray  # the first one
    counts: IntArray
    positions: IntArray  # of the first token
    stops: IntArray  # the position after the last one that a token sees

    @classmethod
    def of(
        cls,
        query_starts: IntArray,
        lengths: IntArray,
        sequences: Iterable[int],
        tokens_per_tile: int,
        lasts: IntArray | None = None,
    ) -> Tiles:
        """Return the tokens of some sequences of a step, in as few tiles as possible.

        Sequence s has the tokens query_starts[s] up to query_starts[s + 1], the last ones of lengths[s]. `lasts`: the
        last position that each token of the step sees, never less than that of the token before; None: its own.

        >>> tiles = Tiles.of(np.array([0, 1, 6]), np.array([300, 20]), range(2), tokens_per_tile=4)
        >>> tiles.tokens.tolist(), tiles.counts.tolist(), tiles.positions.tolist()
        ([0, 1, 5], [1, 4, 1], [299, 15, 19])
        """
        chosen = np.fromiter(sequences, np.int64)
        starts, ends = query_starts[chosen], query_starts[chosen + 1]
        num_tiles = -(-(ends - starts) // tokens_per_tile)
        owner = np.repeat(np.arange(len(chosen)), num_tiles)
        offsets = counted(num_tiles) * tokens_per_tile
        counts = np.minimum(tokens_per_tile, (ends - starts)[owner] - offsets)
        tokens, positions = starts[owner] + offsets, (lengths[chosen] - (ends - starts))[owner] + offsets
        stops = positions + counts if lasts is None else lasts[tokens + counts - 1] + 1
        return cls(chosen[owner], tokens, counts, positions, stops)

    def only(self, chosen: IntArray) -> Tiles:
        """Return some of the tiles, by index."""
        return Tiles(*(getattr(self, column.name)[chosen] for column in fields(self)))


@dataclass(frozen=True, slots=True)
class WorkList:
    """Tasks, entries and merges as the kernels take them, except that tasks name sequences and not their tables."""

    tasks: IntArray  # [num_tasks, 5]
    tokens: IntArray  # [num_entries]
    parts: IntArray  # [num_entries]
    merges: IntArray  # [num_merges, 3]
    num_parts: int

    @property
    def arrays(self) -> tuple[IntArray, ...]:
        """The arrays for the kernels."""
        return self.tasks, self.tokens, self.parts, self.merges

    @property
    def most_parts(self) -> int:
        """The number of parts of the token with the most parts."""
        return int(self.merges[:, 2].max(initial=0))


def work_lists(
    tiles: Tiles,
    *,
    window: int | None = None,
    longest_task: int | None = None,
    prefixes: Sequence[SharedPrefix] = (),
    tokens_per_task: int = 1,
    split: int = SPLIT,
) -> list[WorkList]:
    """Return the work of some tiles, launch by launch. `split`: the positions of a split. Does not mutate.

    Tiles of several splits and more than `longest_task` positions are cut (None: no tiles), and so are the tiles of
    `prefixes`, which have one token each: a task computes a shared split for `tokens_per_task` tokens.
    """
    cuts = _Cuts.of(tiles, window, longest_task, prefixes, split)
    launches = _launches(np.where(cuts.num_shared > 0, 0, cuts.num_parts))
    if not launches.any():
        return [cuts.work_list(prefixes, tokens_per_task)]
    works = []
    for number in range(int(launches.max()) + 1):
        chosen = np.flatnonzero(launches == number)
        own = [replace(prefix, tiles=np.searchsorted(chosen, prefix.tiles)) for prefix in prefixes]
        cuts = _Cuts.of(tiles.only(chosen), window, longest_task, own, split)
        works.append(cuts.work_list(own, tokens_per_task))
        prefixes = ()  # shared tiles are in the first launch
    return works


@dataclass(frozen=True, slots=True)
class _Cuts:
    """Which tiles are cut, where they begin, and the places of their tokens' parts, token by token."""

    tiles: Tiles
    starts: IntArray
    num_splits: IntArray
    num_shared: IntArray  # splits that are computed for several tiles together
    is_cut: BoolArray
    num_parts: IntArray
    split: int

    @property
    def first_parts(self) -> IntArray:
        return before(self.num_parts)

    @classmethod
    def of(
        cls, tiles: Tiles, window: int | None, longest_task: int | None, prefixes: Sequence[SharedPrefix], split: int
    ) -> _Cuts:
        oldest = np.zeros_like(tiles.stops) if window is None else np.maximum(0, tiles.positions - window + 1)
        starts = oldest // split * split
        num_splits = -(-tiles.stops // split) - starts // split
        num_shared = np.zeros_like(num_splits)
        for prefix in prefixes:
            num_shared[prefix.tiles] = prefix.num_splits
        limit = tiles.stops.max(initial=0) if longest_task is None else longest_task
        is_long = (num_splits > 1) & (tiles.stops - starts > limit) & (num_shared == 0)
        is_cut = is_long | (num_shared > 0)
        num_parts = np.where(is_cut, num_splits, 0) * tiles.counts
        return cls(tiles, starts, num_splits, num_shared, is_cut, num_parts, split)

    def work_list(self, prefixes: Sequence[SharedPrefix], tokens_per_task: int) -> WorkList:
        """Return the work of one launch."""
        pieces = [self.own_tasks(), *(self.shared_tasks(prefix, tokens_per_task) for prefix in prefixes)]
        columns, tokens, parts = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
        first_entries = before(columns[:, 0])
        longest_first = np.argsort(columns[:, 2] - columns[:, 3], kind="stable")
        tasks = np.column_stack((first_entries, columns))[longest_first]
        return WorkList(tasks, tokens, parts, self.merges(), int(self.num_parts.sum()))

    def own_tasks(self) -> tuple[IntArray, IntArray, IntArray]:
        """Return (count, sequence, first, stop) of each task of one tile, and the tokens and parts of its entries."""
        tiles = self.tiles
        num_tasks = np.where(self.is_cut, self.num_splits - self.num_shared, 1)
        tile = np.repeat(np.arange(len(num_tasks)), num_tasks)
        split = counted(num_tasks) + self.num_shared[tile]
        first, end = self.starts[tile] + split * self.split, tiles.stops[tile]
        stop = np.where(self.is_cut[tile], np.minimum(first + self.split, end), end)
        counts = tiles.counts[tile]
        task = np.repeat(np.arange(len(tile)), counts)
        owner, place = tile[task], counted(counts)
        parts = self.first_parts[owner] + place * self.num_splits[owner] + split[task]
        columns = np.column_stack((counts, tiles.sequences[tile], first, stop))
        return columns, tiles.tokens[owner] + place, np.where(self.is_cut[owner], parts, -1)

    def shared_tasks(self, prefix: SharedPrefix, tokens_per_task: int) -> tuple[IntArray, IntArray, IntArray]:
        """Return the same for the tasks of a shared prefix, which read the table of their first tile."""
        firsts = np.arange(0, len(prefix.tiles), tokens_per_task)
        first = np.repeat(firsts, prefix.num_splits)
        split = np.tile(np.arange(prefix.num_splits), len(firsts))
        counts = np.minimum(tokens_per_task, len(prefix.tiles) - first)
        task = np.repeat(np.arange(len(first)), counts)
        tile = prefix.tiles[first[task] + counted(counts)]
        sequences = self.tiles.sequences[prefix.tiles[first]]
        columns = np.column_stack((counts, sequences, split * self.split, (split + 1) * self.split))
        return columns, self.tiles.tokens[tile], self.first_parts[tile] + split[task]

    def merges(self) -> IntArray:
        """Return (token, first part, number of parts) of each token that is computed in parts."""
        tile = np.repeat(np.flatnonzero(self.is_cut), self.tiles.counts[self.is_cut])
        place = counted(self.tiles.counts[self.is_cut])
        splits = self.num_splits[tile]
        return np.column_stack((self.tiles.tokens[tile] + place, self.first_parts[tile] + place * splits, splits))


NO_WORK: Final = WorkList(
    np.zeros((0, 5), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, 3), np.int64), num_parts=0
)


def _launches(num_parts: IntArray) -> IntArray:
    """Return the launch of each tile: the first for tiles without parts; each takes the tiles that it has room for.

    >>> _launches(np.array([5000, 0, 3000, 9000, 192])).tolist()
    [0, 0, 0, 1, 2]
    """
    launches = np.zeros_like(num_parts)
    number = size = 0
    for tile in np.flatnonzero(num_parts).tolist() if num_parts.sum() > MOST_PARTS else ():
        is_full = size > 0 and size + num_parts[tile] > MOST_PARTS
        number, size = number + is_full, num_parts[tile] + (0 if is_full else size)
        launches[tile] = number
    return launches


def before(counts: IntArray) -> IntArray:
    """Return for each count the sum of all earlier ones.

    >>> before(np.array([2, 0, 3])).tolist()
    [0, 2, 2]
    """
    return np.cumsum(counts) - counts


def counted(counts: IntArray) -> IntArray:
    """Return the numbers from 0 up to each count, joined.

    >>> counted(np.array([2, 0, 3])).tolist()
    [0, 1, 0, 1, 2]
    """
    return np.arange(counts.sum()) - np.repeat(before(counts), counts)
