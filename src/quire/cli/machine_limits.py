"""The limits of the machine, memory bandwidth and arithmetic, measured in the same run as the results.

The bandwidth is that of the fastest of a few passes over more memory than the caches hold. The arithmetic is that of
the instruction set in use, on registers only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from quire.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from quire._native import Kernels, ThreadTeam
    from quire.compute.backend import BackendFacts

NUM_PASSES = 5
ARITHMETIC_S = 0.2

HALVES = ("avx512_bf16", "amx")
"""Kernel sets that multiply bfloat16 numbers directly."""


class Limits(Protocol):
    """The limits of the device that an engine computes on; `name`: the kernels or the device measured."""

    name: str

    def bandwidth(self) -> float:
        """Return bytes read per second."""
        ...

    def arithmetic(self) -> float | None:
        """Return additions and multiplications per second; None if unknown."""
        ...


def limits_of(facts: BackendFacts, read_bytes: int) -> Limits:
    """Return the limits of the device that a backend computes on."""
    if facts.name != "torch":
        return MachineLimits(facts.num_threads, read_bytes)
    from quire.compute.torch.limits import TorchLimits

    return TorchLimits(facts.device, facts.dtype, read_bytes)


class MachineLimits:
    """The limits for a number of threads; `read_bytes` is the amount of memory to read when measuring bandwidth."""

    def __init__(self, num_threads: int, read_bytes: int) -> None:
        try:
            from quire import _benchmarks, _native
            from quire.compute.native.load import kernels_for
        except ImportError as error:
            allowed = "one that works without the compiled core, which cannot be imported; see quire doctor"
            raise InvalidConfigError("benchmark", "of the machine's limits", allowed) from error
        self._native, self._benchmarks = _native, _benchmarks
        self.team: ThreadTeam = _native.ThreadTeam(num_threads)
        self.kernels: Kernels = kernels_for(None)
        self.name: str = self.kernels.name
        try:
            self._memory = np.ones(read_bytes, np.uint8)
        except MemoryError as error:
            raise InvalidConfigError("read size", read_bytes, "bytes that fit into memory") from error

    def bandwidth(self) -> float:
        """Return bytes read per second, all threads together."""
        return self._memory.nbytes / min(self._benchmarks.read_seconds(self.team, self._memory, NUM_PASSES))

    def rates(self) -> dict[str, float]:
        """Return additions and multiplications per second for each number type, with the best kernel set for it.

        Types without a measurement are left out; int8 is one of them.
        """
        names = self._native.kernel_names()
        sets = {
            "float32": [name for name in names if name not in HALVES],
            "bfloat16": [n for n in names if n in HALVES],
        }
        found = {}
        for dtype, members in sets.items():
            if members:
                kernels = self._native.kernels(members[-1])
                found[dtype] = self._benchmarks.arithmetic_rate(kernels, self.team, ARITHMETIC_S)
        return {dtype: rate for dtype, rate in found.items() if rate}

    def arithmetic(self) -> float | None:
        """Return additions and multiplications per second, all threads together; None if unknown."""
        return self._benchmarks.arithmetic_rate(self.kernels, self.team, ARITHMETIC_S) or None
