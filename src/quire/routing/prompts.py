"""RoutedPrompt: what a router needs to know about a prompt, its length and the names of its full blocks.

The names are the digests by which engines report their blocks (`CacheNews`): chained hashes under one key for all
engines. The salt, the adapter and the extra keys of a request are in the root of the chain, so requests of tenants with
different salts never share a name.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from quire.core.request import DEFAULT_SCOPE, CacheScope
from quire.memory.block_hash import BlockHasher, root_key
from quire.memory.cache_journal import DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class RoutedPrompt:
    """A prompt as a router sees it. `digests`: the names of its full blocks, from the first on."""

    num_tokens: int
    digests: tuple[bytes, ...]


class PromptNames:
    """Names the blocks of prompts as engines with the same key and block size do.

    >>> names = PromptNames(block_size=2, hash_key=b"secret")
    >>> one, other = names.of(array("i", [1, 2, 3, 4, 5])), names.of(array("i", [1, 2, 9, 9]))
    >>> one.num_tokens, len(one.digests), one.digests[0] == other.digests[0], one.digests[1] == other.digests[1]
    (5, 2, True, False)
    """

    def __init__(self, block_size: int, hash_key: bytes) -> None:
        self.block_size = block_size
        self._hasher = BlockHasher(hash_key)

    def of(self, tokens: array[int], scope: CacheScope = DEFAULT_SCOPE) -> RoutedPrompt:
        """Return the routed form of a prompt. Pure, so any thread may call it; about 1 µs for each block."""
        data, child = tokens.tobytes(), self._hasher.child
        size = self.block_size * tokens.itemsize
        digest, digests = self._hasher.root(root_key(scope)), []
        for at in range(0, len(data) - size + 1, size):
            digest = child(digest, data[at : at + size])
            digests.append(digest[:DIGEST_BYTES])
        return RoutedPrompt(len(tokens), tuple(digests))
