"""token_numbers: the random number of each token at each position of a text, without state.

    (seed, position) ─► key, two words ─► a hash of (key, id) for each token ─► a number between 0 and 1

A number is an odd multiple of 2^-53, so it is neither 0 nor 1, and unlikely tokens keep their chances. Its upper 32
bits need three products of 32 bits, which vector units have. The other bits matter only for a token that may win its
draw.

>>> keys = draw_keys(np.array([7, 7, 8]), np.array([40, 41, 40]))
>>> [token_numbers(key, np.array([0, 1])).round(4).tolist() for key in keys]
[[0.456, 0.3079], [0.0798, 0.8287], [0.132, 0.3462]]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import IntArray

Words = NDArray[np.uint32]


def draw_keys(seeds: IntArray, positions: IntArray) -> Words:
    """Return the key of each draw, [num_draws, 2]: SplitMix64's finaliser, seed first, so that (1, 7) is not (7, 1)."""
    words = _mixed(_mixed(_mixed(seeds.astype(np.uint64))) ^ positions.astype(np.uint64))
    return np.stack([words >> np.uint64(32), words & np.uint64(0xFFFFFFFF)], axis=-1).astype(np.uint32)


def token_numbers(key: Words, tokens: IntArray) -> NDArray[np.float64]:
    """Return the numbers of tokens. `key`: that of the draw."""
    upper = _upper_bits(key, tokens.astype(np.uint32))
    lower = (upper ^ key[0]) * np.uint32(0xAC4C1B51)
    lower = (lower ^ (lower >> np.uint32(15))) * np.uint32(0xED5AD4BB)
    bits = upper.astype(np.uint64) << np.uint64(20) | (lower >> np.uint32(12)).astype(np.uint64)
    found: NDArray[np.float64] = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return found


def _upper_bits(key: Words, tokens: Words) -> Words:
    words = (tokens ^ key[0]) * np.uint32(0x21F0AAAD)
    words = ((words ^ (words >> np.uint32(15))) + key[1]) * np.uint32(0xD35A2D97)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(0x31848BAB)
    upper: Words = words ^ (words >> np.uint32(14))
    return upper


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
