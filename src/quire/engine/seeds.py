"""Seeds for requests that bring none: a keyed counter, so that the same calls give the same seeds.

The i-th seed is a hash of the engine's own seed and i. Nothing is drawn from a shared generator, so no request's seed
depends on what other requests have sampled.
"""

from __future__ import annotations

import hashlib
import struct

SEED_BITS = 62  # one bit less than a request may bring: sequence i draws with seed + i


class SeedCounter:
    """Gives out seeds, each once.

    >>> first, again = SeedCounter(7), SeedCounter(7)
    >>> seeds = [first.take() for _ in range(3)]
    >>> seeds == [again.take() for _ in range(3)], len(set(seeds)), SeedCounter(8).take() in seeds
    (True, 3, False)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_taken = 0

    def take(self) -> int:
        """Return the next seed. Mutates."""
        message = struct.pack("<QQ", self._seed, self._num_taken)
        self._num_taken += 1
        return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> (64 - SEED_BITS)
