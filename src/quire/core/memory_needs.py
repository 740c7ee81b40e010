"""MemoryNeeds: the memory that an engine takes besides its KV memory, and the free memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

KV_SHARE: Final = 0.5
"""Of the free memory that weights and activations leave, where no `kv_memory` is given."""

UNKNOWN_FREE_BYTES: Final = 2 << 30
"""Taken to be free where the system does not say."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """What an engine takes besides its KV memory. `rest_bytes`: what the process has taken already.

    `free_bytes` is what it may still take; None where the system does not say. `kv_share` of what is left is for KV
    blocks. `host_bytes`: what is free where blocks are swapped to, where that is another memory.
    """

    weight_bytes: int
    activation_bytes: int
    rest_bytes: int = 0
    free_bytes: int | None = None
    kv_share: float = KV_SHARE
    host_bytes: int | None = None
    graph_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        """What weights, activations and graphs leave; negative where they do not fit."""
        free = self.free_bytes
        taken = self.weight_bytes + self.activation_bytes + self.graph_bytes
        return UNKNOWN_FREE_BYTES if free is None else free - taken

    def left_beside(self, swap_bytes: int) -> int:
        """Return what weights, activations and swap leave."""
        return self.left_bytes - (swap_bytes if self.host_bytes is None else 0)
