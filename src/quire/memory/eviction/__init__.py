"""Eviction policies, created by name."""

from __future__ import annotations

from quire.core.errors import InvalidConfigError
from quire.memory.eviction.base import EvictionPolicy

__all__ = ["EvictionPolicy", "create_eviction_policy"]


def create_eviction_policy(name: str) -> EvictionPolicy:
    """Return a new eviction policy with this name; imports only its module."""
    if name == "lru":
        from quire.memory.eviction.lru import LRUEviction

        return LRUEviction()
    if name == "fifo":
        from quire.memory.eviction.fifo import FIFOEviction

        return FIFOEviction()
    if name == "priority":
        from quire.memory.eviction.priority import PriorityEviction

        return PriorityEviction()
    raise InvalidConfigError("eviction", name, "lru, fifo or priority")
