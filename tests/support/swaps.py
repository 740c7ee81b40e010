"""Notes how each attempt to swap a request out ended, and lets the device lose what moved out."""

from __future__ import annotations

import numpy as np
import pytest

from quire import KVCacheManager, Request
from quire.compute.worker import cache_engine


def noted_swaps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows by whether the memory swapped, each time that it is asked to."""
    swapped: list[bool] = []
    swap_out = KVCacheManager.swap_out

    def noted(manager: KVCacheManager, request: Request) -> bool:
        swapped.append(swap_out(manager, request))
        return swapped[-1]

    monkeypatch.setattr(KVCacheManager, "swap_out", noted)
    return swapped


def lost_where_moved_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite a block of the device that has moved out, because a request often gets its own blocks back.

    Only without a prefix cache, which may hit the block as long as nothing else is written into it.
    """
    take = cache_engine._Tier.take

    def moved(tier: cache_engine._Tier, block: int, source: cache_engine._Tier, source_block: int) -> None:
        take(tier, block, source, source_block)
        if tier.name == "num_host_blocks":
            for array in source.arrays:
                array[source_block].view(np.uint8).fill(0xFF)  # NaN

    monkeypatch.setattr(cache_engine._Tier, "take", moved)
