"""Random blocks of every type of GGUF, and the numbers that they stand for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.compute.gguf.blocks import BLOCK_TYPES
from quire.compute.weights.codes import CODINGS

SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}  # float16 numbers; of the others at the start
TYPES = {block.name: block for block in BLOCK_TYPES.values()}


def blocks_of(kind: str, num_rows: int, width: int = 512) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return rows of random blocks, and the numbers that they stand for."""
    random, block = np.random.default_rng(0), TYPES[kind]
    data = random.integers(0, 256, (num_rows * width // block.size, block.num_bytes), np.uint8)
    for at in SCALES_AT.get(kind, (0, 2) if CODINGS[kind].minimums else (0,)):
        data[:, at : at + 2] = random.normal(0, 0.1, (len(data), 1)).astype("<f2").view(np.uint8)
    return data.reshape(num_rows, -1), block.widen(data).reshape(num_rows, width)
