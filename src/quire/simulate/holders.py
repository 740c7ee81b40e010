"""Holders: the holder of each block at one moment, as a number.

-1 only cached      0 free      1 shared by several      2 and more: one request, by its order of arrival
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from quire.core.request import Request
from quire.core.step import NO_BLOCK
from quire.memory.manager import KVCacheManager
from quire.scheduler.scheduler import OLDER

CACHED, FREE, SHARED, FIRST_OWNER = -1, 0, 1, 2


def holders_of(memory: KVCacheManager, running: Iterable[Request]) -> array[int]:
    """Return the holder of every block. Does not mutate; free blocks take almost no time."""
    blocks = memory.pool.blocks
    found = array("i", [FREE]) * len(blocks)
    for block in memory.pool.cached_blocks():
        found[block.block_id] = CACHED
    for request in running:
        for table in memory.block_tables(request):
            for block_id in table:
                if block_id != NO_BLOCK:
                    arrival = request.serial % OLDER  # of one that began in another engine too
                    found[block_id] = SHARED if blocks[block_id].ref_count > 1 else FIRST_OWNER + arrival
    return found
