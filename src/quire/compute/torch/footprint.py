"""Footprint: the device memory that a model takes. Estimated before loading, measured afterwards.

    free at the start ──┬── weights         what they hold once they are read
                        ├── activations     the most that the largest steps held in addition
                        ├── graphs          what recording took, of torch's memory and of the driver's
                        ├── rest            the context, libraries, compiled kernels: whatever else is gone by then
                        └── free            for KV blocks

It is measured over a KV memory of one block: the largest steps store nothing and read the first block alone. Graphs
hold the addresses of what they read, so those recorded here are thrown away and recorded again over the real blocks;
rejected was to guess what they take, of which the driver's part is known to nobody. What is held is counted as torch
reserves it, not as tensors use it: what lies between tensors is not free for blocks either. This module knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from quire.compute.torch.device import CONTEXT_BYTES


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by what they are for; `free_bytes` are left after weights and the rest."""

    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    free_bytes: int

    @classmethod
    def foreseen(cls, weight_bytes: int, activation_bytes: int, free_bytes: int) -> Footprint:
        """Return what is expected of a device that has so much free before anything is opened."""
        return cls(weight_bytes, activation_bytes, 0, free_bytes - CONTEXT_BYTES - weight_bytes)


class DeviceMemory(Protocol):
    """The memory of a device, as torch and its driver know it."""

    def free(self) -> int:
        """Give back what nothing holds, and return the bytes that the device has free then."""
        ...

    def held(self) -> int:
        """Return the bytes that torch holds."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Do some work; return the most bytes that torch held meanwhile."""
        ...


def measure(memory: DeviceMemory, rehearse: Callable[[], object], record: Callable[[], object]) -> Footprint:
    """Return the memory taken in addition to the loaded weights. `record` returns the graphs, which are then freed.

    What steps take again each time is in the footprint of activations, and what the first ones leave is not free.
    """
    memory.free()
    weight_bytes = memory.held()
    activation_bytes = memory.peak(rehearse) - weight_bytes
    unrecorded = memory.free()
    graphs = record()
    graph_bytes = max(unrecorded - memory.free(), 0)
    del graphs
    return Footprint(weight_bytes, activation_bytes, graph_bytes, memory.free())
