"""CudaMemory: the free and the used memory of a GPU, from torch and the driver."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch


class CudaMemory:
    """The memory of a GPU; implements `DeviceMemory`."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)

    def free(self) -> int:
        """Release torch's unused memory, and return the free bytes of the device. Waits for the device."""
        gc.collect()  # also frees memory that only reference cycles hold
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        num_bytes: int = torch.cuda.mem_get_info(self._device)[0]
        return num_bytes

    def held(self) -> int:
        """Return the bytes that torch holds."""
        num_bytes: int = torch.cuda.memory_reserved(self._device)
        return num_bytes

    def peak(self, work: Callable[[], object]) -> int:
        """Do some work; return the most bytes that torch held meanwhile."""
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        torch.cuda.synchronize(self._device)
        num_bytes: int = torch.cuda.max_memory_reserved(self._device)
        return num_bytes
