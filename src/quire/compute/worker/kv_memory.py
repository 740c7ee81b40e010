"""KVMemory: the interface of a runner's KV memory to the worker, for any device and layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from quire.core.kv_spec import KVCacheSpec
from quire.core.step import StepPlan

FinishRead: TypeAlias = Callable[[], None]
"""Waits until the bytes that are read are in the buffer."""


class KVMemory(Protocol):
    """The KV memory of one rank. Only its own runner knows the layout."""

    spec: KVCacheSpec
    num_blocks: int

    def allocate(self) -> None:
        """Allocate the memory. Mutates; earlier content is lost."""
        ...

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's moves out, then copies, then moves in. Mutates the memory."""
        ...

    def read_block(self, block: int, group: int, buffer: memoryview) -> FinishRead:
        """Start to copy the bytes of a block that holds tokens of a group into `buffer`. Does not mutate the memory.

        Reads what steps submitted earlier have written; later steps may overwrite the block. Any thread may finish.
        Room that a group does not use stays unchanged in the buffer: in the block it may have content of earlier
        requests.
        """
        ...

    def write_block(self, block: int, group: int, buffer: memoryview) -> None:
        """Copy bytes that `read_block` has read back into a block, after all steps submitted earlier. Mutates."""
        ...

    def release(self) -> None:
        """Release the memory. Mutates; may be called twice."""
        ...
