"""The prefix cache: indexes of the content of blocks, created by name."""

from __future__ import annotations

from quire.core.errors import InvalidConfigError
from quire.memory.block_hash import BlockHasher
from quire.memory.prefix.base import PrefixEntry, PrefixIndex

__all__ = ["PrefixEntry", "PrefixIndex", "create_prefix_index"]


def create_prefix_index(name: str, *, block_bytes: int, num_groups: int, hasher: BlockHasher) -> PrefixIndex:
    """Return a new prefix index with this name; imports only its module."""
    if name == "hash_chain":
        from quire.memory.prefix.hash_chain import HashChainIndex

        return HashChainIndex(block_bytes, num_groups, hasher)
    if name == "radix_tree":
        from quire.memory.prefix.radix_tree import RadixTreeIndex

        return RadixTreeIndex(block_bytes, num_groups)
    if name == "none":
        from quire.memory.prefix.none import NoPrefixIndex

        return NoPrefixIndex(num_groups)
    raise InvalidConfigError("prefix_index", name, "hash_chain, radix_tree or none")
