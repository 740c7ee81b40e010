"""Random blocks of every type of GGUF, of E4M3 and of NVFP4, and the numbers that they stand for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quire.compute.gguf.blocks import BLOCK_TYPES
from quire.compute.weights.codes import CODINGS
from support.quantized_models import E2M1, E4M3

# Where float16 numbers are, of those types that do not have one at the start.
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,)}
TYPES = {block.name: block for block in BLOCK_TYPES.values()}


def blocks_of(kind: str, num_rows: int, width: int = 512) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return rows of random blocks, or of numbers of F16, and the numbers that they stand for."""
    if kind == "E4M3":
        return e4m3_blocks_of(num_rows, width)
    if kind == "NVFP4":
        return nvfp4_blocks_of(num_rows, width)
    random, block = np.random.default_rng(0), TYPES[kind]
    data = random.integers(0, 256, (num_rows * width // block.size, block.num_bytes), np.uint8)
    if kind == "MXFP4":
        data[:, 0] = random.integers(104, 144, len(data))  # scales that float16 holds, each halved
        return data.reshape(num_rows, -1), block.widen(data).reshape(num_rows, width)
    if kind == "IQ1_M":
        words, halves = data[:, 48:].view("<u2"), random.normal(0, 0.1, (len(data), 1)).astype("<f2").view("<u2")
        words[:] = words & 0xFFF | halves >> np.array([0, 4, 8, 12], np.uint16) << np.uint16(12)
        return data.reshape(num_rows, -1), block.widen(data).reshape(num_rows, width)
    has_minimums = kind in CODINGS and CODINGS[kind].minimums
    for at in SCALES_AT.get(kind, (0, 2) if has_minimums else (0,)):
        data[:, at : at + 2] = random.normal(0, 0.1, (len(data), 1)).astype("<f2").view(np.uint8)
    return data.reshape(num_rows, -1), block.widen(data).reshape(num_rows, width)


def e4m3_blocks_of(num_rows: int, width: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return rows of blocks of 128 floats of 8 bits, every byte that is a number among them."""
    random = np.random.default_rng(0)
    scales = random.normal(0, 0.01, (num_rows * width // 128, 1)).astype("<f4")
    data = random.choice(np.flatnonzero(~np.isnan(E4M3)), (len(scales), 128)).astype(np.uint8)
    numbers = (E4M3[data] * scales.astype(np.float64)).astype(np.float32)
    return np.concatenate([scales.view(np.uint8), data], axis=1).reshape(num_rows, -1), numbers.reshape(num_rows, width)


def nvfp4_blocks_of(num_rows: int, width: int) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return rows of blocks of 32 random e2m1; each 16 have one of all scales from 0 on."""
    random = np.random.default_rng(0)
    factors = random.normal(0, 0.01, num_rows).astype("<f4")
    scales = random.integers(0, 0x7F, (num_rows, width // 32, 2)).astype(np.uint8)
    codes = random.integers(0, 16, (num_rows, width // 32, 32))
    blocks = b"".join(
        nvfp4_block(factors[row], scales[row, block], codes[row, block])
        for row in range(num_rows)
        for block in range(width // 32)
    )
    products = E4M3[scales].astype(np.float32) * factors[:, None, None]  # rounded before the integers multiply them
    numbers = 2 * E2M1[codes] * np.repeat(products, 16, axis=2).astype(np.float64)
    data = np.frombuffer(blocks, np.uint8).reshape(num_rows, -1)
    return data, numbers.astype(np.float32).reshape(num_rows, width)


def nvfp4_block(factor: np.float32, scales: NDArray[np.uint8], codes: NDArray[np.int64]) -> bytes:
    """Return a block: a factor, two scales, and the codes, the first 16 in the low halves of bytes."""
    halves = bytes(int(codes[place]) | int(codes[place + 16]) << 4 for place in range(16))
    return factor.tobytes() + scales.tobytes() + halves
