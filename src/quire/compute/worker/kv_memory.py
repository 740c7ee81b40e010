"""KVMemory: what a worker asks of the memory that its runner computes over, wherever and however that lies."""

from __future__ import annotations

from typing import Protocol

from quire.core.kv_spec import KVCacheSpec
from quire.core.step import StepPlan


class KVMemory(Protocol):
    """The KV memory of one rank. How a runner reads it is between the two: they are made for one another."""

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
