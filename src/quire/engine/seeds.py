"""Seeds for requests without one: a keyed counter, so that the same calls get the same seeds.

The i-th seed of a tenant is a hash of the engine's own seed, i and the tenant's name. Nothing is drawn from a shared
generator, so no request's seed depends on what other requests have sampled, nor on how many requests other tenants have
sent. Otherwise a tenant could count the requests of others by finding the seed that reproduces its own text.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter

SEED_BITS = 62  # one bit less than a request can set: sequence i draws with seed + i


class SeedCounter:
    """Returns seeds, each once per tenant.

    >>> first, again = SeedCounter(7), SeedCounter(7)
    >>> seeds = [first.take() for _ in range(3)]
    >>> seeds == [again.take() for _ in range(3)], len(set(seeds)), SeedCounter(8).take() in seeds
    (True, 3, False)
    >>> first.take("ada") == again.take("ada"), first.take("bob") == again.take("ada")
    (True, False)
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._num_taken: Counter[str] = Counter()

    def take(self, tenant: str = "") -> int:
        """Return the next seed of a tenant. Mutates."""
        message = struct.pack("<QQ", self._seed, self._num_taken[tenant]) + tenant.encode("utf-8", "surrogatepass")
        self._num_taken[tenant] += 1
        return int.from_bytes(hashlib.blake2b(message, digest_size=8).digest(), "little") >> (64 - SEED_BITS)
