"""MemoryNeeds: the memory that an engine takes in addition to its KV memory, and the free memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

KV_SHARE: Final = 0.5
"""The share of the remaining free memory for KV blocks, unless `kv_memory` is given."""

UNKNOWN_FREE_BYTES: Final = 2 << 30
"""The assumed free memory if the system does not report it."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """The memory that an engine takes without its KV memory. `rest_bytes`: already taken by the process.

    `free_bytes` is the memory that the engine may still take; None if the system does not report it. `kv_share`: the
    share of the remaining memory for KV blocks. `host_bytes`: free host memory for swapped blocks, if the device has
    its own memory. `adapter_bytes`: memory for adapters.
    """

    weight_bytes: int
    activation_bytes: int
    rest_bytes: int = 0
    free_bytes: int | None = None
    kv_share: float = KV_SHARE
    host_bytes: int | None = None
    graph_bytes: int = 0
    adapter_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """The memory left after weights, adapters, activations and graphs; negative if they do not fit."""
        free = self.free_bytes
        taken = self.weight_bytes + self.activation_bytes + self.graph_bytes + self.adapter_bytes
        return UNKNOWN_FREE_BYTES if free is None else free - taken

    def within(self, memory_bytes: int | None) -> MemoryNeeds:
        """Return the needs with the free memory limited to `memory_bytes`; None: no limit.

        >>> MemoryNeeds(10, 2, free_bytes=100).within(50).left_bytes, MemoryNeeds(10, 2).within(50).left_bytes
        (38, 38)
        """
        if memory_bytes is None:
            return self
        free = memory_bytes if self.free_bytes is None else min(self.free_bytes, memory_bytes)
        return replace(self, free_bytes=free)

    def left_beside(self, swap_bytes: int) -> int:
        """Return the memory left after swap too: `left_bytes` less `swap_bytes`, unless swap has its own memory."""
        return self.left_bytes - (swap_bytes if self.host_bytes is None else 0)
