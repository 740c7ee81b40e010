"""Routers: which replica gets the next request.

    round_robin       one after another
    least_loaded      the one with the fewest requests, running and waiting
    prefix_affinity   the one that saw the longest prefix before, unless it has far more to do than the others

A router has the same facts as one in front of servers: the prompt, and the number of requests that each
replica had at the end of its last step.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from quire.core.errors import InvalidConfigError

ROUND_ROBIN, LEAST_LOADED, PREFIX_AFFINITY = "round_robin", "least_loaded", "prefix_affinity"
ROUTERS = (ROUND_ROBIN, LEAST_LOADED, PREFIX_AFFINITY)
MAX_BEGINNINGS = 1 << 16


class Router(Protocol):
    """Chooses replicas."""

    def choose(self, prompt: array[int], loads: Sequence[int]) -> int:
        """Return the replica for a prompt; `loads` are the requests that each has. Mutates the router."""
        ...


class RoundRobin:
    """One after another.

    >>> router = RoundRobin()
    >>> [router.choose(array("i", [1]), [5, 0, 0]) for _ in range(4)]
    [0, 1, 2, 0]
    """

    def __init__(self) -> None:
        self._next = -1

    def choose(self, prompt: array[int], loads: Sequence[int]) -> int:
        """Return the next replica. Mutates."""
        self._next = (self._next + 1) % len(loads)
        return self._next


class LeastLoaded:
    """The one with the fewest requests, the first of several."""

    def choose(self, prompt: array[int], loads: Sequence[int]) -> int:
        """Return the replica with the least load. Does not mutate."""
        return loads.index(min(loads))


class PrefixAffinity:
    """The replica that got the longest prefix of the prompt last; the least loaded one if none did.

    Keeps chained hashes of the chunks of prefixes, up to a maximum, the latest used. If the replica has over `slack`
    requests more than the least loaded one, chooses that: a popular prefix must not overload a replica.
    """

    def __init__(self, *, chunk_tokens: int = 16, max_chunks: int = 64, slack: int = 16) -> None:
        self._chunk_tokens = chunk_tokens
        self._max_chunks = max_chunks
        self._slack = slack
        self._sent: OrderedDict[bytes, int] = OrderedDict()

    def choose(self, prompt: array[int], loads: Sequence[int]) -> int:
        """Return the replica of the longest known prefix, or the least loaded one. Mutates."""
        beginnings = self._beginnings(prompt)
        known = next((self._sent[digest] for digest in reversed(beginnings) if digest in self._sent), None)
        least = min(loads)
        chosen = loads.index(least) if known is None or loads[known] > least + self._slack else known
        for digest in beginnings:
            self._sent[digest] = chosen
            self._sent.move_to_end(digest)
        while len(self._sent) > MAX_BEGINNINGS:
            self._sent.popitem(last=False)
        return chosen

    def _beginnings(self, prompt: array[int]) -> list[bytes]:
        """Return the hashes of the prompt's first chunk, its first two, and so on."""
        size, digest, found = self._chunk_tokens, b"", []
        for at in range(0, min(len(prompt), size * self._max_chunks) - size + 1, size):
            tokens = prompt[at : at + size].tobytes()
            digest = hashlib.blake2b(digest + tokens, digest_size=16).digest()
            found.append(digest)
        return found


def create_router(name: str) -> Router:
    """Return a new router by its name; raises `InvalidConfigError` for an unknown one."""
    if name == ROUND_ROBIN:
        return RoundRobin()
    if name == LEAST_LOADED:
        return LeastLoaded()
    if name == PREFIX_AFFINITY:
        return PrefixAffinity()
    raise InvalidConfigError("router", name, f"one of {', '.join(ROUTERS)}")
