"""Parts of a step, timed by themselves; see native/benchmarks/benchmarks.h."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire._native import Kernels, ThreadTeam

def read_seconds(team: ThreadTeam, data: NDArray[np.uint8], num_passes: int) -> list[float]:
    """Seconds of each pass in which the team reads the bytes once."""

def arithmetic_rate(kernels: Kernels, team: ThreadTeam, seconds: float) -> float:
    """Additions and multiplications per second on registers, as the kernels do them; 0: not known."""

class ProductBenchmark:
    """Copies of a packed matrix, and products with them."""

    def __init__(
        self, kernels: Kernels, team: ThreadTeam, rows: NDArray[np.uint16], num_copies: int, *, codes: str = ""
    ) -> None: ...
    @property
    def num_bytes(self) -> int:
        """Bytes of one copy."""
    def run(self, num_rows: int, num_calls: int) -> list[float]:
        """Seconds of each product; every call takes the next copy."""

def attention_seconds(
    kernels: Kernels,
    team: ThreadTeam,
    layers: Sequence[tuple[NDArray[np.uint16 | np.int8], NDArray[np.uint16 | np.int8]]],
    dtype: str,
    tables: NDArray[np.int64],
    lengths: NDArray[np.int64],
    num_queries: int,
    num_heads: int,
    head_dim: int,
    num_passes: int,
) -> list[float]:
    """Seconds of each pass of the newest tokens of all sequences over all layers, each given by its keys and values."""
