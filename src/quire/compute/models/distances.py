"""Biases by distance: a number for each head and each distance of a key from a query, added to their score (T5).

    distance (key - query)    -91 and less  … -12…-15  -8…-11  -7 … 0    1 … 7     8…11  12…15  …  91 and more
    bucket                    15            …  9        8       7 … 0    17 … 23   24    25     …  31

Up to 7, each distance has its own bucket. Then each bucket begins at √2 times the distance of the one before.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray, IntArray

NUM_BUCKETS: Final = 32
EACH_SIDE: Final = NUM_BUCKETS // 2
NUM_NEAR: Final = EACH_SIDE // 2
"""The distances on each side that have their own bucket."""

MARGIN: Final = 64
"""The positions of a tile, which engines read together: some are after the end of a text."""


def buckets_of(distances: IntArray) -> IntArray:
    """Return the bucket of each distance.

    >>> buckets_of(np.array([-200, -12, -3, 0, 3, 12, 200])).tolist()
    [15, 9, 3, 0, 19, 25, 31]
    """
    size = np.abs(distances)
    found = np.minimum(size, NUM_NEAR)
    for step in range(1, EACH_SIDE - NUM_NEAR):  # in integers: the square of √2 to a power is exact
        found = found + (size * size >= NUM_NEAR**2 << step)
    buckets: IntArray = found + np.where(distances > 0, EACH_SIDE, 0)
    return buckets


def num_distances(length: int) -> int:
    """Return the number of distances in a text of a length, and from its tokens to the `MARGIN` after its end."""
    return 2 * length + MARGIN


def biases_by_distance(table: FloatArray, length: int) -> FloatArray:
    """Return the biases of each head for all distances, from -length on, `[num_heads, num_distances]`.

    `table` is `[NUM_BUCKETS, num_heads]`.
    """
    return np.ascontiguousarray(table[buckets_of(np.arange(num_distances(length)) - length)].T)
