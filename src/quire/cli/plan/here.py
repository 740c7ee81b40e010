"""This machine as a `Hardware`: the compiled core measures its CPU, not its GPU, in about a second."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from quire.cli.machine_limits import MachineLimits
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.core.granted import free_memory, usable_cores
from quire.simulate.hardware import Hardware, find_hardware

HERE: Final = "here"
READ_BYTES: Final = 512 << 20
LEAST_READ_BYTES: Final = 64 << 20
STEP_OVERHEAD_S: Final = 0.0005
COPY_BANDWIDTH: Final = 4e9
NOTES: Final = (
    "Measured just now: memory bandwidth (the best of a few passes over more memory than the caches hold) and "
    "arithmetic on registers. int8 is not measured and counts as bfloat16. The overhead of a step and the speed "
    "of swapping come from benchmarks/RESULTS.md."
)


def find_machine(name: str, config: EngineConfig) -> Hardware:
    """Return a machine by its name or file; `here` is measured with the threads of the config."""
    if name != HERE:
        return find_hardware(name)
    if config.device == "cuda" or find_spec("quire._native") is None:
        allowed = "a machine from the list, such as nvidia-h100: here measures the CPU only"
        raise InvalidConfigError("hardware", HERE, allowed)
    return measure_here(config.num_threads or usable_cores())


def measure_here(num_threads: int) -> Hardware:
    """Measure this machine with this many threads. Uses memory and CPU for about a second."""
    free = free_memory() or 1 << 31
    limits = MachineLimits(num_threads, max(min(READ_BYTES, free // 4), LEAST_READ_BYTES))
    return Hardware(
        name=HERE,
        memory_bytes=max(free, 1),
        read_bandwidth=limits.bandwidth(),
        matrix_rate=limits.rates(),
        step_overhead_s=STEP_OVERHEAD_S,
        host_link_bandwidth=COPY_BANDWIDTH,
        notes=NOTES,
    )
