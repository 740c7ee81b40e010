"""Keys and values of 4 bits: the rotation, the rounding, and the bytes that the native engine writes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from quire import _native
from quire.compute.native import NativeSettings, kv_cache_spec
from quire.compute.weights.bfloat16 import narrowed
from quire.compute.weights.int4 import quantized, rotated, rounded_to_int4
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.key_centres import key_centres, num_blocks
from support.native_runs import NativeRun
from support.tiny_checkpoint import write_tiny_qwen3

LENGTH = 50
TOKENS = [(7 * i * i + 3 * i + 5) % 64 for i in range(LENGTH)]
ROWS = st.lists(
    st.lists(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), min_size=32, max_size=32), min_size=1, max_size=4
)


def hadamard(count: int) -> NDArray[np.float64]:
    """The matrix of a row of `count` numbers, an element at a time: its sign is the parity of the common bits."""
    size = count & -count
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return np.kron(np.eye(count // size), np.array(signs) / math.sqrt(size))


@pytest.mark.parametrize("count", [1, 2, 3, 8, 24, 64, 80, 96, 128])
def test_a_rotation_keeps_products_and_is_its_own_inverse(count: int) -> None:
    queries, keys = np.random.default_rng(count).normal(size=(2, 5, count)).astype(np.float32)
    assert np.allclose(rotated(keys), keys @ hadamard(count), atol=1e-5)
    assert np.allclose(rotated(rotated(keys)), keys, atol=1e-5)
    assert np.allclose(rotated(queries) @ rotated(keys).T, queries @ keys.T, atol=1e-4)


@given(ROWS)
def test_a_number_is_rounded_to_the_nearest_of_sixteen(rows: list[list[float]]) -> None:
    numbers = np.array(rows, np.float32)
    n, scales, minimums = quantized(numbers)
    assert ((n >= 0) & (n <= 15) & (n == np.rint(n))).all()
    for stored in (scales, minimums):
        assert (np.ascontiguousarray(stored).view(np.uint32) & 0xFFFF == 0).all(), "bfloat16"
    # Both are rounded by 1/256 of their size at most; at the ends of the range that adds to half a step.
    slack = 0.51 * scales + 15 / 256 * scales + np.abs(numbers).max(axis=-1) / 256
    assert (np.abs(n * scales[:, None] + minimums[:, None] - numbers).max(axis=-1) <= slack).all()


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_breaks_its_group_and_no_other(broken: float) -> None:
    n, scales, minimums = quantized(np.array([[1.0, broken], [1.0, 4.75]], np.float32))
    assert np.isnan(scales).tolist() == [True, False]
    assert (n[1].tolist(), minimums[1]) == ([0, 15], 1.0)
    assert np.isnan(rounded_to_int4(np.array([[1.0, broken]], np.float32))).all()


def test_equal_numbers_have_a_scale_of_zero() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        n, scales, minimums = quantized(np.array([[2.5, 2.5], [0.0, 0.0], [3e38, -3e38]], np.float32))
    assert (n[:2].tolist(), minimums[:2].tolist()) == ([[0, 0], [0, 0]], [2.5, 0.0])
    assert scales[:2].tolist() == [0, 0]
    assert np.isnan(scales[2]), "a range that is no float"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_qwen3(folder)
    return folder


def first_layer(
    folder: Path, kv_dtype: str, instruction_set: str
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float32]]:
    """The bytes of the keys and the values of the first layer, by block and head, and the centre of its keys."""
    settings = NativeSettings(dtype="float32", kv_dtype=kv_dtype, instruction_set=instruction_set)
    run = NativeRun(folder, settings=settings, num_blocks=4)
    run.prefill(0, TOKENS)
    keys, values = (array.view(np.uint8) for array in run.worker.cache.places()[0])
    heads, decoder = run.driver.spec.num_kv_heads, run.runner._runner
    kv_spec = kv_cache_spec(decoder.spec, 16, "float32")
    memory = CacheEngine(kv_spec, num_blocks=num_blocks(decoder.spec, kv_spec))
    centres = key_centres(decoder.spec, memory, decoder, decoder._read_keys)
    return keys.reshape(4, heads, -1), values.reshape(4, heads, -1), centres[0]


def tokens_of(block: NDArray[np.uint8], head_dim: int, *, keys: bool) -> NDArray[np.float32]:
    """The numbers of the tokens of a block, [16, head_dim], stored as float32."""
    padded = -(-head_dim // 16) * 16
    numbers = block.view(np.float32)
    rows = numbers[: 16 * head_dim].reshape(head_dim, 16).T if keys else numbers.reshape(16, padded)[:, :head_dim]
    return np.ascontiguousarray(rows)


def pairs(lane: NDArray[np.uint8]) -> Iterator[tuple[int, int]]:
    """The four pairs of numbers of four bytes."""
    word = int(lane.view(np.uint32)[0])
    return ((word >> 4 * p & 15, word >> 16 + 4 * p & 15) for p in range(4))


@pytest.mark.parametrize("instruction_set", _native.kernel_names())
def test_the_native_engine_writes_what_the_reference_rounds(model: Path, instruction_set: str) -> None:
    exact_keys, exact_values, centre = first_layer(model, "float32", instruction_set)
    int4_keys, int4_values, _ = first_layer(model, "int4", instruction_set)
    head_dim = centre.shape[1]
    padded = -(-head_dim // 32) * 32
    numbers = 16 * padded // 2
    for block, head in np.ndindex(3, exact_keys.shape[1]):  # blocks that are full
        key, value = int4_keys[block, head], int4_values[block, head]
        rows = rotated(tokens_of(exact_keys[block, head], head_dim, keys=True) - centre[head])
        for index, start in enumerate(range(0, head_dim, 32)):
            group = rows[:, start : start + 32]
            n, scales, minimums = quantized(group)
            stored = key[numbers:].view(np.uint16).reshape(-1, 16, 2)[index]
            assert stored.tolist() == np.stack([narrowed(scales), narrowed(minimums)], axis=1).tolist()
            for token, i in np.ndindex(16, group.shape[1] // 8):
                at = ((start // 8 + i) * 16 + token) * 4
                found = [each for pair in pairs(key[at : at + 4]) for each in pair]
                assert found == n[token, 8 * i : 8 * i + 8].tolist()
        n, scales, minimums = quantized(rotated(tokens_of(exact_values[block, head], head_dim, keys=False)))
        stored = value[numbers:].view(np.uint16).reshape(16, 2)
        assert stored.tolist() == np.stack([narrowed(scales), narrowed(minimums)], axis=1).tolist()
        for token, d in np.ndindex(16, head_dim):
            at = ((token // 4 * (padded // 32) + d // 32) * 16 + d % 16) * 4
            pair = list(pairs(value[at : at + 4]))[token % 4 // 2 * 2 + d % 32 // 16]
            assert pair[token % 2] == n[token, d]
