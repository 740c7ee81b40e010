"""CacheEngine: blocks are copied and moved as a plan says, in its order, in every array, and nothing else changes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.compute.worker.cache_engine import POISON, STORED_AS, CacheEngine
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.step import BlockCopy, BlockMove, StepPlan, column

GROUPS = (KVGroup((0, 3)), KVGroup((2, 1), window=4))


def spec_of(dtype: str) -> KVCacheSpec:
    return KVCacheSpec(4, 2, 8, dtype, GROUPS)


def plan(**moves: Any) -> StepPlan:
    return StepPlan(0, column(), column(), column(), column(), **moves)


def numbered(engine: CacheEngine, first: int) -> None:
    """Give every device block of every array a number of its own."""
    for place, pair in enumerate(engine.places()):
        for kind, array in enumerate(pair):
            for block in range(engine.num_blocks):
                array[block] = first + 20 * place + 10 * kind + block


def blocks_of(engine: CacheEngine) -> list[list[list[Any]]]:
    """The numbers of each block, by place and kind; a block that does not hold one number alone fails."""
    found = []
    for pair in engine.places():
        for array in pair:
            assert all(len(np.unique(array[block])) == 1 for block in range(engine.num_blocks))
        found.append([[array[block].flat[0].item() for block in range(engine.num_blocks)] for array in pair])
    return found


@given(st.integers(0, 1 << 40), st.sampled_from(sorted(STORED_AS)))
def test_blocks_end_up_where_a_slow_model_has_them(seed: int, dtype: str) -> None:
    rng = random.Random(seed)
    engine = CacheEngine(spec_of(dtype), num_blocks=6, num_host_blocks=3)
    engine.allocate()
    numbered(engine, 1)
    device = [
        [list(range(1 + 20 * place + 10 * kind, 7 + 20 * place + 10 * kind)) for kind in (0, 1)] for place in (0, 1)
    ]
    host: list[list[list[int]]] = [[[0] * 3 for _ in (0, 1)] for _ in (0, 1)]
    for _ in range(rng.randint(1, 6)):
        out, copies, back = (
            [(rng.randrange(6), rng.randrange(size)) for _ in range(rng.randint(0, 3))] for size in (3, 6, 3)
        )
        engine.apply(
            plan(
                moves_out=tuple(BlockMove(*pair) for pair in out),
                copies=tuple(BlockCopy(*pair) for pair in copies),
                moves_in=tuple(BlockMove(*pair) for pair in back),
            )
        )
        for place in (0, 1):
            for kind in (0, 1):
                mine, theirs = device[place][kind], host[place][kind]
                for block, host_block in out:
                    theirs[host_block] = mine[block]
                for source, destination in copies:
                    mine[destination] = mine[source]
                for block, host_block in back:
                    mine[block] = theirs[host_block]
        assert blocks_of(engine) == device


def test_layers_of_one_place_share_an_array_and_those_of_two_do_not() -> None:
    engine = CacheEngine(spec_of("float32"), num_blocks=3)
    engine.allocate()
    layers = [engine.layer(layer) for layer in range(4)]
    assert [layer.group for layer in layers] == [0, 1, 1, 0]
    first, second = engine.places()
    for layer, (keys, values) in ((0, first), (2, first), (3, second), (1, second)):
        assert np.shares_memory(layers[layer].keys, keys)
        assert np.shares_memory(layers[layer].values, values)
    assert len({id(array) for pair in engine.places() for array in pair}) == 4
    assert engine.places() is engine.places()


@pytest.mark.parametrize(
    ("dtype", "of_keys", "of_values"),
    [("float32", 8, 8), ("bfloat16", 8, 8), ("int8", 12, 12), ("k8v4", 12, 8), ("int4", 8, 8)],
)
@pytest.mark.parametrize("touch_threads", [0, 2])
def test_an_array_has_room_for_every_head_of_every_slot(
    dtype: str, of_keys: int, of_values: int, touch_threads: int
) -> None:
    engine = CacheEngine(spec_of(dtype), num_blocks=3, touch_threads=touch_threads)
    engine.allocate()
    arrays = [array for pair in engine.places() for array in pair]
    for index, array in enumerate(arrays):
        assert (array.shape, array.dtype) == ((3, 4 * 2 * (of_values if index % 2 else of_keys)), STORED_AS[dtype])
    assert sum(array.nbytes for array in arrays) == 3 * engine.spec.bytes_per_block
    assert not any(array.any() for array in arrays)


@pytest.mark.parametrize("dtype", sorted(STORED_AS))
@pytest.mark.parametrize("touch_threads", [0, 2])
def test_poisoned_memory_is_no_number_until_it_is_written(dtype: str, touch_threads: int) -> None:
    engine = CacheEngine(spec_of(dtype), num_blocks=2, num_host_blocks=1, poison=True, touch_threads=touch_threads)
    engine.allocate()
    engine.apply(plan(moves_in=(BlockMove(1, 0),)))  # the host's is poisoned as well
    for pair in engine.places():
        for array in pair:
            bits = np.ascontiguousarray(array).view(np.uint8)
            expected = np.full(array.shape, POISON[array.dtype.type], array.dtype).view(np.uint8)
            assert np.array_equal(bits, expected)
    half = np.array([POISON[np.uint16], 0xFFFF], np.uint32) << 16  # a bfloat16, and one of four bytes
    assert np.isnan(half.view(np.float32)).all()
    assert np.isnan(np.array([POISON[np.int8]] * 4, np.int8).view(np.float32)).all()


@pytest.mark.parametrize(
    ("moves", "message"),
    [
        ({"copies": (BlockCopy(0, 3),)}, "a plan names block 3; num_blocks is 3"),
        ({"copies": (BlockCopy(3, 0),)}, "a plan names block 3; num_blocks is 3"),
        ({"copies": (BlockCopy(-1, 0),)}, "a plan names block -1; num_blocks is 3"),
        ({"moves_out": (BlockMove(0, 2),)}, "a plan names block 2; num_host_blocks is 2"),
        ({"moves_out": (BlockMove(3, 0),)}, "a plan names block 3; num_blocks is 3"),
        ({"moves_in": (BlockMove(0, -1),)}, "a plan names block -1; num_host_blocks is 2"),
        ({"moves_in": (BlockMove(3, 1),)}, "a plan names block 3; num_blocks is 3"),
    ],
)
def test_a_block_that_is_not_there_is_named_and_nothing_is_written(moves: dict[str, Any], message: str) -> None:
    engine = CacheEngine(spec_of("float32"), num_blocks=3, num_host_blocks=2)
    engine.allocate()
    numbered(engine, 1)
    before = blocks_of(engine)
    with pytest.raises(ExecutionError) as caught:
        engine.apply(plan(**moves))
    assert str(caught.value) == message
    assert blocks_of(engine) == before


def test_the_last_blocks_of_both_tiers_are_blocks() -> None:
    engine = CacheEngine(spec_of("float32"), num_blocks=3, num_host_blocks=2)
    engine.allocate()
    numbered(engine, 1)
    engine.apply(plan(moves_out=(BlockMove(2, 1),), copies=(BlockCopy(0, 2),), moves_in=(BlockMove(0, 1),)))
    assert blocks_of(engine)[0][0] == [3, 2, 1]


def test_what_was_given_back_is_taken_again_empty() -> None:
    engine = CacheEngine(spec_of("float32"), num_blocks=2, num_host_blocks=1)
    engine.allocate()
    numbered(engine, 1)
    engine.apply(plan(moves_out=(BlockMove(1, 0),)))
    engine.release()
    engine.release()
    assert engine.places() == []
    engine.allocate()
    engine.apply(plan(moves_in=(BlockMove(1, 0),)))
    assert blocks_of(engine) == [[[0.0, 0.0], [0.0, 0.0]]] * 2


def test_numbers_that_nothing_computes_with_on_a_cpu_are_refused() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        CacheEngine(spec_of("float16"), num_blocks=1)
    assert (
        str(caught.value) == "dtype of the KV cache is 'float16'; allowed: one of float32, bfloat16, int8, k8v4, int4"
    )


@pytest.mark.parametrize(("sizes", "name"), [((1 << 60, 0), "num_blocks"), ((1, 1 << 60), "num_host_blocks")])
def test_memory_that_cannot_be_had_is_named(sizes: tuple[int, int], name: str) -> None:
    engine = CacheEngine(spec_of("float32"), num_blocks=sizes[0], num_host_blocks=sizes[1])
    with pytest.raises(InvalidConfigError) as caught:
        engine.allocate()
    assert str(caught.value) == f"{name} is {1 << 60}; allowed: as many as fit into memory, 1024 bytes each"
