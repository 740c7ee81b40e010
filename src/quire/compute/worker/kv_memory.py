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

    def read_block(self, block: int, group: int, buffer: memoryview) -> None:
        """Copy the bytes of a block that holds tokens of a group into `buffer`. Does not mutate the memory.

        What a group with fewer layers leaves unused is not among them: the rest of the buffer stays as it is.
        """
        ...

    def write_block(self, block: int, group: int, buffer: memoryview) -> None:
        """Copy the bytes that `read_block` has read back into a block, after all steps submitted before. Mutates."""
        ...

    def release(self) -> None:
        """Give the memory back. Mutates; may be called twice."""
        ...
