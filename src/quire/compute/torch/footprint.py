"""Footprint: the device memory that a model takes. Estimated before loading, measured afterwards.

    free at the start ──┬── weights         held after loading
                        ├── activations     the most that the largest steps held in addition
                        ├── graphs          taken by recording, from torch's memory and the driver's
                        ├── rest            everything else: the context, libraries, compiled kernels
                        └── free            for KV blocks

It is measured with a KV memory of one block: the largest steps store nothing and read only the first block. Graphs hold
the addresses of what they read, so these graphs are discarded, and recorded again with the real blocks.
Rejected: guessing their memory, because the driver's part is unknown. Memory counts as torch reserves it, not as
tensors use it: gaps between tensors are not free for blocks either. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from quire.compute.torch.device import CONTEXT_BYTES


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by purpose; `free_bytes` remain after weights and the rest."""

    weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    free_bytes: int

    @classmethod
    def foreseen(cls, weight_bytes: int, activation_bytes: int, free_bytes: int) -> Footprint:
        """Return the expected footprint on a device with this much free memory before anything is opened."""
        return cls(weight_bytes, activation_bytes, 0, free_bytes - CONTEXT_BYTES - weight_bytes)

    def without_adapters(self, num_bytes: int) -> Footprint:
        """Return the footprint without the slots of adapters, which were measured with the weights."""
        return replace(self, weight_bytes=self.weight_bytes - num_bytes, free_bytes=self.free_bytes + num_bytes)


class DeviceMemory(Protocol):
    """The memory of a device, from torch and its driver."""

    def free(self) -> int:
        """Release unused memory, and return the free bytes of the device."""
        ...

    def held(self) -> int:
        """Return the bytes that torch holds."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Do some work; return the most bytes that torch held meanwhile."""
        ...


def measure(memory: DeviceMemory, rehearse: Callable[[], object], record: Callable[[], object]) -> Footprint:
    """Return the memory taken in addition to the loaded weights. `record` returns the graphs, which are then freed.

    Memory that each step takes again counts as activations; memory that the first steps keep is not free.
    """
    memory.free()
    weight_bytes = memory.held()
    activation_bytes = memory.peak(rehearse) - weight_bytes
    unrecorded = memory.free()
    graphs = record()
    graph_bytes = max(unrecorded - memory.free(), 0)
    del graphs
    return Footprint(weight_bytes, activation_bytes, graph_bytes, memory.free())
