"""TenantQuota: limits how many cached blocks one tenant may keep.

The limit does not count blocks that the tenant's running requests hold. So a noisy tenant cannot push the prefixes of
others out of the cache: over the limit, its own block that was freed longest ago is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from quire.core.errors import InvariantError
from quire.memory.block import Block


class TenantQuota:
    """The cached blocks of each tenant, oldest first; all operations O(1).

    >>> quota = TenantQuota(1)
    >>> a, b = Block(0), Block(1)
    >>> quota.add(a), quota.add(b) is a
    (None, True)
    """

    def __init__(self, max_cached_blocks: int) -> None:
        self._limit = max_cached_blocks
        self._kept: dict[str, OrderedDict[int, Block]] = {}

    def add(self, block: Block) -> Block | None:
        """Add a block that became cached; return the block to evict for it, if any. Mutates; O(1)."""
        kept = self._kept.setdefault(block.tenant, OrderedDict())
        kept[block.block_id] = block
        return next(iter(kept.values())) if len(kept) > self._limit else None

    def remove(self, block: Block) -> None:
        """Remove a block that is no longer cached. Mutates; O(1)."""
        kept = self._kept[block.tenant]
        del kept[block.block_id]
        if not kept:
            del self._kept[block.tenant]

    def check(self, cached: Iterable[Block]) -> None:
        """Raise `InvariantError` unless exactly the cached blocks are counted and no tenant is over its limit."""
        counted = {block_id for kept in self._kept.values() for block_id in kept}
        if counted != {block.block_id for block in cached}:
            raise InvariantError("the quota's count differs from the cached blocks")
        if any(len(kept) > self._limit for kept in self._kept.values()):
            raise InvariantError("a tenant keeps more cached blocks than its quota")
