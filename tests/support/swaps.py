"""Notes how each attempt to swap a request out ended."""

from __future__ import annotations

import pytest

from quire import KVCacheManager, Request


def noted_swaps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that grows by whether the memory swapped, each time that it is asked to."""
    swapped: list[bool] = []
    swap_out = KVCacheManager.swap_out

    def noted(manager: KVCacheManager, request: Request) -> bool:
        swapped.append(swap_out(manager, request))
        return swapped[-1]

    monkeypatch.setattr(KVCacheManager, "swap_out", noted)
    return swapped
