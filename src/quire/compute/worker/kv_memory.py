"""KVMemory: what a worker needs from the KV memory of its runner, on any device and with any layout."""

from __future__ import annotations

from typing import Protocol

from quire.core.kv_spec import KVCacheSpec
from quire.core.step import StepPlan


class KVMemory(Protocol):
    """The KV memory of one rank. A runner reads it in its own way: the two are made for each other."""

    spec: KVCacheSpec
    num_blocks: int

    def allocate(self) -> None:
        """Allocate the memory. Mutates; what was stored is lost."""
        ...

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's moves out, then copies, then moves in. Mutates the memory."""
        ...

    def release(self) -> None:
        """Give the memory back. Mutates; may be called twice."""
        ...
