"""Prefix hashes: a block is identified by its tokens *and everything before them*.

    hash(root)    = H(salt, adapter, extra keys)
    hash(block i) = H(hash(block i - 1), tokens of block i)

The same tokens after another prefix have other keys and values, so chaining gives them another hash. H is keyed blake2b
over the packed 32-bit token ids: unambiguous ([1, 23] and [12, 3] differ), and without the key a client cannot make
collisions on purpose. Even so, a hash is only a way to *find* a block: the index compares the tokens on every hit, and
the tests run with a hash of 4 bits.
"""

from __future__ import annotations

import hashlib

from quire.core.request import CacheScope
from quire.core.wire import WireWriter


def root_key(scope: CacheScope) -> bytes:
    """Return the key of a request's root: equal only for equal salts, adapters and extra keys.

    >>> root_key(CacheScope(salt="a", extra_keys=("b",))) == root_key(CacheScope(salt="ab"))
    False
    >>> root_key(CacheScope(adapter="a")) == root_key(CacheScope(extra_keys=("a",)))
    False
    """
    writer = WireWriter()
    writer.text(scope.salt)
    writer.text(scope.adapter)
    for key in scope.extra_keys:
        writer.text(key)
    return writer.to_bytes()


class BlockHasher:
    """Makes the hashes of a chain.

    >>> hasher = BlockHasher(b"secret")
    >>> root = hasher.root(root_key(CacheScope()))
    >>> len(hasher.child(root, bytes(64))), hasher.child(root, bytes(64)) == hasher.child(root, bytes(64))
    (16, True)
    """

    __slots__ = ("_keyed", "_mask")

    def __init__(self, key: bytes = b"", num_bits: int = 128) -> None:
        num_bytes = -(-num_bits // 8)
        self._keyed = hashlib.blake2b(digest_size=num_bytes, key=key)
        self._mask = (1 << num_bits) - 1 if num_bits % 8 else 0

    def root(self, key: bytes) -> bytes:
        """Return the hash that a chain starts from."""
        return self.child(b"", key)

    def child(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the hash of the block with these tokens after the block hashed to `parent`."""
        state = self._keyed.copy()
        state.update(parent + tokens)
        digest = state.digest()
        if self._mask:
            return (int.from_bytes(digest) & self._mask).to_bytes(len(digest))
        return digest
