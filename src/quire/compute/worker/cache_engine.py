"""CacheEngine: the KV memory of one rank, and the copies and moves of its blocks.

The layers of a model are split into groups of equal size (see `quire.core.kv_spec`), each with
block tables of its own, and **one** pool of blocks serves them all. So the memory has an array per
*place* in a group, not per layer:

                place 0                place 1
    block 0   ┌ layer 0 ┬ K, V ┐     ┌ layer 1 ┬ K, V ┐    held by group 0 = layers (0, 1)
    block 1   ├ layer 2 ┼ K, V ┤     ├ layer 3 ┼ K, V ┤    held by group 1 = layers (2, 3)
    block 2   └ …  its holder's layers ──────┘

A block that changes hands needs no conversion, and copying one is copying its rows of every array. Host blocks have the
same arrays. How keys and values lie within a block is the model runner's own affair; the shape below is that of the
reference. With `poison` the memory starts as NaN: reading a slot that was never written shows in the logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import StepPlan

CacheArray: TypeAlias = NDArray[Any]
"""Keys or values of one place: float32, uint16 that holds bfloat16, or int8 with a scale behind each head."""

STORED_AS: Final = MappingProxyType({"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8})
POISON: Final = MappingProxyType({"float32": math.nan, "bfloat16": 0x7FC0, "int8": -1})  # NaN, of int8 as a scale


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where a layer keeps its keys and values, and the group whose block tables lead there."""

    group: int
    keys: FloatArray  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: FloatArray  # [num_blocks, block_size, num_kv_heads, head_dim]


class CacheEngine:
    """Owns the KV arrays of device and host; moves bytes as the control plane decides.

    Memory comes from the system as blocks are first written. With `touch_threads` it is all written to at the start, by
    this many threads, and no step waits for the system later.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        *,
        num_blocks: int,
        num_host_blocks: int = 0,
        poison: bool = False,
        touch_threads: int = 0,
    ) -> None:
        if spec.dtype not in STORED_AS:
            raise InvalidConfigError("dtype of the KV cache", spec.dtype, f"one of {', '.join(STORED_AS)}")
        self.spec = spec
        self.num_blocks = num_blocks
        self._device = _Tier("num_blocks", num_blocks)
        self._host = _Tier("num_host_blocks", num_host_blocks)
        self._poison = poison
        self._touch_threads = touch_threads
        self._pairs: list[tuple[CacheArray, CacheArray]] = []
        self._places = {
            layer: (index, place) for index, group in enumerate(spec.groups) for place, layer in enumerate(group.layers)
        }

    def allocate(self) -> None:
        """Allocate the memory. Mutates; what was stored is lost."""
        self._device.allocate(self.spec, self._poison)
        self._host.allocate(self.spec, self._poison)
        arrays = self._device.arrays
        self._pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
        if self._touch_threads and not self._poison:
            from concurrent.futures import ThreadPoolExecutor  # which every other start need not wait for

            with ThreadPoolExecutor(self._touch_threads) as threads:
                list(threads.map(_touch, self._device.arrays + self._host.arrays))

    def release(self) -> None:
        """Give the memory back. Mutates; may be called twice."""
        self._device.arrays.clear()
        self._host.arrays.clear()
        self._pairs = []

    def layer(self, layer: int) -> LayerCache:
        """Return the cache of one layer. Does not mutate; the arrays are the memory itself."""
        group, place = self._places[layer]
        keys, values = self._device.arrays[2 * place : 2 * place + 2]
        return LayerCache(group, keys, values)

    def places(self) -> list[tuple[CacheArray, CacheArray]]:
        """Return keys and values of each place: the memory itself, and the same list as long as it is allocated."""
        return self._pairs

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's moves out, then copies, then moves in. Mutates the memory."""
        for block, host_block in plan.moves_out:
            self._host.take(host_block, self._device, block)
        for source, destination in plan.copies:
            self._device.take(destination, self._device, source)
        for block, host_block in plan.moves_in:
            self._device.take(block, self._host, host_block)


class _Tier:
    """The blocks of one kind of memory: an array of keys, then one of values, per place."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.arrays: list[CacheArray] = []

    def allocate(self, spec: KVCacheSpec, poison: bool) -> None:
        """Allocate every array. Mutates."""
        shape = (self.num_blocks, spec.block_size, spec.num_kv_heads, spec.numbers_per_head)
        try:
            self.arrays = [_new_array(shape, spec.dtype, poison) for _ in range(2 * spec.layers_per_group)]
        except (MemoryError, ValueError) as error:
            allowed = f"as many as fit into memory, {spec.bytes_per_block} bytes each"
            raise InvalidConfigError(self.name, self.num_blocks, allowed) from error

    def take(self, block: int, source: _Tier, source_block: int) -> None:
        """Copy a block of `source` into a block of this tier. Mutates."""
        self._require(block)
        source._require(source_block)
        for written, read in zip(self.arrays, source.arrays, strict=True):
            written[block] = read[source_block]

    def _require(self, block: int) -> None:
        if not 0 <= block < self.num_blocks:
            raise ExecutionError(f"a plan names block {block}; {self.name} is {self.num_blocks}")


def _touch(array: CacheArray) -> None:
    array.fill(0)


def _new_array(shape: tuple[int, ...], dtype: str, poison: bool) -> CacheArray:
    # Zeros come from the system untouched: memory is taken only as blocks are written.
    array: CacheArray = np.zeros(shape, STORED_AS[dtype])
    if poison:
        array[...] = POISON[dtype]
    return array
