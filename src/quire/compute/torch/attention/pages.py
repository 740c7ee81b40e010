"""The pages of a step: block tables as the lists of block ids, one after another, that FlashInfer reads.

    block_tables     sequence 0   7 3 9 ·      17 tokens in blocks of 8        indptr    0     3   5
                     sequence 1   · 4 2 ·      13 tokens, the first 8          indices   7 3 9 4 2
                                               lie before the window           last      1     5

Blocks before the oldest token that a query sees are left out: their entries can be -1, and a kernel that loads full
tiles would read them. Nothing else changes, because masks depend on the distance to the end of the list.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.torch.attention.base import StepShape
from quire.compute.torch.attention.work import before, counted


@dataclass(frozen=True, slots=True)
class Pages:
    """The tokens of some sequences and the blocks that they read, as int arrays of the host."""

    query_starts: IntArray  # [num_sequences + 1], from 0 on
    indptr: IntArray  # [num_sequences + 1]: sequence s has indices[indptr[s] : indptr[s + 1]]
    indices: IntArray  # ids of blocks
    last_lengths: IntArray  # [num_sequences]: tokens in the last block, at least one

    @classmethod
    def of(cls, step: StepShape, sequences: slice, group: int, window: int | None, block_size: int) -> Pages:
        """Return the pages of one KV group that some sequences of a step read. Does not mutate."""
        starts, ends = step.query_starts[:-1][sequences], step.query_starts[1:][sequences]
        lengths, table = step.lengths[sequences], step.block_tables[group][sequences]
        oldest = np.zeros_like(lengths) if window is None else np.maximum(0, lengths - (ends - starts) - window + 1)
        firsts, stops = oldest // block_size, -(-lengths // block_size)
        counts = stops - firsts
        owner = np.repeat(np.arange(len(counts)), counts)
        return cls(
            query_starts=_starts(ends - starts),
            indptr=_starts(counts),
            indices=table[owner, firsts[owner] + counted(counts)],
            last_lengths=lengths - (stops - 1) * block_size,
        )


def _starts(counts: IntArray) -> IntArray:
    """Return where each run of these lengths begins, and where the last one ends."""
    return np.append(before(counts), counts.sum())
