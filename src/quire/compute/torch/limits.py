"""The limits of a device for reading memory and multiplying, measured with torch's own operations on random numbers.

A limit is the best of a few passes. On a GPU, events time them, which excludes the launch of a kernel and the wait for
its end. The limit for memory is the fastest of three passes: a sum over more numbers than any cache holds, a sum over
twice as many, and a copy, counting both directions. Numbers are random, because a GPU that multiplies zeros saves power
and runs faster than it can with a model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import torch

from quire.compute.torch.load import open_device
from quire.compute.torch.weights import DTYPES
from quire.core.errors import InvalidConfigError

NUM_PASSES: Final = {"cpu": 5, "cuda": 20}
LEAST_READ_BYTES: Final = 1 << 20
MOST_COPIES: Final = 64
"""The most copies of a matrix; several are used so that no cache holds them all."""
PRODUCT_SIZES: Final = {"cpu": 512, "cuda": 8192}


class TorchLimits:
    """The limits of a device, for products of a dtype. Reads `read_bytes` of memory, and twice as much."""

    def __init__(self, device: str, dtype: str, read_bytes: int) -> None:
        self.name = f"torch, {device}"
        self._device = open_device(device)
        size = PRODUCT_SIZES[self._device.type]
        kind = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(dtype, torch.float32)
        try:
            self._memory = torch.rand((2, max(read_bytes, LEAST_READ_BYTES) // 4), device=self._device)
        except RuntimeError as error:
            raise InvalidConfigError("read size", read_bytes, "at most half of the free memory") from error
        self._matrix = torch.randn(size, size, device=self._device).to(kind)

    def bandwidth(self) -> float:
        """Return bytes read per second."""
        first, second = self._memory
        num_bytes: int = 4 * self._memory.numel()
        read_s, half_s = self._fastest(self._memory.sum), self._fastest(first.sum)
        copied_s = self._fastest(lambda: second.copy_(first))
        return max(num_bytes / read_s, num_bytes / 2 / half_s, num_bytes / copied_s)

    def arithmetic(self) -> float:
        """Return additions and multiplications per second in matrix products."""
        return 2 * len(self._matrix) ** 3 / self._fastest(lambda: self._matrix @ self._matrix)

    def _fastest(self, compute: Callable[[], object]) -> float:
        """Return the seconds of the fastest of a few passes, after a warm-up."""
        compute()
        return min(seconds_of(compute, self._device) for _ in range(NUM_PASSES[self._device.type]))


def captured(compute: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Compute once, and return a function that repeats the computation: on a GPU, a graph's replay."""
    compute()
    if device.type != "cuda":
        return compute
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    graph.replay()
    replay: Callable[[], None] = graph.replay
    return replay


def seconds_of(compute: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call, on a GPU measured with events."""
    if device.type != "cuda":
        started = time.perf_counter()
        compute()
        return time.perf_counter() - started
    torch.cuda.synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    compute()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def product_seconds(device: str, dtype: str, size: tuple[int, int, int], num_bytes: int) -> Callable[[], float]:
    """Return a function that times a product of the library (rows, outputs, inputs), over `num_bytes` of matrices."""
    (num_rows, num_outputs, num_inputs), where, kind = size, torch.device(device), DTYPES[dtype]
    num_copies = max(1, min(MOST_COPIES, -(-num_bytes // (kind.itemsize * num_outputs * num_inputs))))
    matrices = torch.randn((num_copies, num_outputs, num_inputs), device=where, dtype=kind)
    rows = torch.randn((num_rows, num_inputs), device=where, dtype=kind)

    def multiply() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(rows, matrix)

    run = captured(multiply, where)
    return lambda: seconds_of(run, where) / num_copies
