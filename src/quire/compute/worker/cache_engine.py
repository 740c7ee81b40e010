"""CacheEngine: the KV memory of one rank, and the copies and moves of its blocks.

The layers of a model are split into groups of equal size (see `quire.core.kv_spec`). Each group has its own block
tables, and **one** pool of blocks serves all groups. So the memory has an array per *place* in a group, not per layer:

                place 0                place 1
    block 0   ┌ layer 0 ┬ K, V ┐     ┌ layer 1 ┬ K, V ┐    held by group 0 = layers (0, 1)
    block 1   ├ layer 2 ┼ K, V ┤     ├ layer 3 ┼ K, V ┤    held by group 1 = layers (2, 3)
    block 2   └ …  its holder's layers ──────┘

Layers with fewer numbers than others share a place, one after another (`KVCacheSpec.layers_per_place`).
If the values are part of the keys (`KVCacheSpec.latent_dim`), their arrays are empty. In a block of a recurrent group,
the arrays of a place hold the two halves of a layer's state.

A block that gets another owner needs no conversion, and copying a block copies its rows of every array. Host blocks
have the same arrays. Each model runner chooses the layout within a block; the shape below is the reference decoder's.
With a draft model, a second set of arrays holds its layers, in the same blocks: copies and moves of a block apply to
both sets. With `poison` the memory starts as NaN: reading a slot that was never written shows in the logits.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.compute.arrays import FloatArray
from quire.compute.worker.kv_memory import FinishRead
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import StepPlan

CacheArray: TypeAlias = NDArray[Any]
"""Keys or values of one place, a row for each block: float32, bfloat16 as uint16, or bytes with scales after the
numbers of each head."""

STORED_AS: Final = MappingProxyType(
    {"float32": np.float32, "bfloat16": np.uint16, "int8": np.int8, "k8v4": np.int8, "int4": np.int8}
)
POISON: Final = MappingProxyType({np.float32: math.nan, np.uint16: 0x7FC0, np.int8: -1})  # NaN, for bytes as a scale


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys and values of a layer, and the group whose block tables it uses."""

    group: int
    keys: FloatArray  # [num_blocks, block_size, num_kv_heads, head_dim]
    values: FloatArray  # [num_blocks, block_size, num_kv_heads, head_dim], or latent_dim instead: the keys' beginning


@dataclass(frozen=True, slots=True)
class StateCache:
    """The states of a recurrent layer, in two halves, and the group whose block tables it uses."""

    group: int
    block_size: int
    halves: tuple[FloatArray, FloatArray]  # [num_blocks, key heads / 2, floats of a key head]


class CacheEngine:
    """Owns the KV arrays of device and host; copies and moves blocks as plans specify.

    The system grants memory when a block is first written. With `touch_threads`, this many threads write to all memory
    at the start, so that no step waits for the system later.
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
        self.draft: CacheEngine | None = None
        """The layers of the draft model in the same blocks; None without one."""
        if spec.draft is not None:
            self.draft = CacheEngine(
                spec.draft,
                num_blocks=num_blocks,
                num_host_blocks=num_host_blocks,
                poison=poison,
                touch_threads=touch_threads,
            )
        self._places = {
            layer: (index, *divmod(rank, spec.layers_per_place(group)))
            for index, group in enumerate(spec.groups)
            for rank, layer in enumerate(group.layers)
        }

    def allocate(self) -> None:
        """Allocate the memory. Mutates; earlier content is lost."""
        self._device.allocate(self.spec, self._poison)
        self._host.allocate(self.spec, self._poison)
        arrays = self._device.arrays
        self._pairs = list(zip(arrays[::2], arrays[1::2], strict=True))
        if self._touch_threads and not self._poison:
            from concurrent.futures import ThreadPoolExecutor  # imported only if needed, for a faster start

            with ThreadPoolExecutor(self._touch_threads) as threads:
                list(threads.map(_touch, self._device.arrays + self._host.arrays))
        if self.draft is not None:
            self.draft.allocate()

    def release(self) -> None:
        """Release the memory. Mutates; may be called twice."""
        self._device.arrays.clear()
        self._host.arrays.clear()
        self._pairs = []
        if self.draft is not None:
            self.draft.release()

    def layer(self, layer: int) -> LayerCache:
        """Return the cache of one layer. Does not mutate; the arrays are the memory itself."""
        group, place, part = self._places[layer]
        heads, sizes = self.spec.heads_of(self.spec.groups[group]), self.spec.layer_bytes(self.spec.groups[group])
        keys, values = (
            array[:, part * size // array.itemsize : (part + 1) * size // array.itemsize].reshape(
                self.num_blocks, self.spec.block_size, heads.num_kv_heads, -1
            )
            for array, size in zip(self._arrays(place), sizes, strict=True)
        )
        return LayerCache(group, keys, keys[..., : self.spec.latent_dim] if self.spec.latent_dim else values)

    def states(self, layer: int, num_key_heads: int) -> StateCache:
        """Return the states of a recurrent layer in float32 memory. Does not mutate; the arrays are the memory."""
        group, place, _ = self._places[layer]
        num_floats = self.spec.recurrent_bytes // 4
        first, second = (
            half[:, :num_floats].reshape(self.num_blocks, num_key_heads // 2, -1) for half in self._arrays(place)
        )
        return StateCache(group, self.spec.block_size, (first, second))

    def _arrays(self, place: int) -> list[CacheArray]:
        return self._device.arrays[2 * place : 2 * place + 2]

    def places(self) -> list[tuple[CacheArray, CacheArray]]:
        """Return keys and values of each place: the memory itself, and the same list while it is allocated."""
        return self._pairs

    def read_block(self, block: int, group: int, buffer: memoryview) -> FinishRead:
        """Copy the bytes of a block of a group into `buffer`, one array after another. Does not mutate the memory."""
        for view, num_used in self._views(block, group):
            buffer[:num_used] = view[:num_used]
            buffer = buffer[len(view) :]
        return lambda: None

    def write_block(self, block: int, group: int, buffer: memoryview) -> None:
        """Copy bytes in the form of `read_block` into a block. Mutates."""
        for view, _ in self._views(block, group):
            view[:] = buffer[: len(view)]
            buffer = buffer[len(view) :]

    def _views(self, block: int, group: int) -> list[tuple[memoryview, int]]:
        """Return the bytes of a block in each array, and how many of them the group uses."""
        used = self.spec.used_bytes(self.spec.groups[group])
        views = [
            (memoryview(array[block]).cast("B"), num_used)
            for array, num_used in zip(self._device.arrays, used, strict=False)
            if array.size
        ]
        # The layers of a draft model use the blocks of the first group; those of others only have room for them.
        of_draft = [] if self.draft is None else self.draft._views(block, 0)
        return views + [(view, 0 if group else num_used) for view, num_used in of_draft]

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's moves out, then copies, then moves in. Mutates the memory."""
        for block, host_block in plan.moves_out:
            self._host.take(host_block, self._device, block)
        for source, destination in plan.copies:
            self._device.take(destination, self._device, source)
        for block, host_block in plan.moves_in:
            self._device.take(block, self._host, host_block)
        if self.draft is not None:
            self.draft.apply(plan)


class _Tier:
    """The blocks of one kind of memory: an array of keys, then one of values, per place."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.arrays: list[CacheArray] = []

    def allocate(self, spec: KVCacheSpec, poison: bool) -> None:
        """Allocate every array. Mutates."""
        dtype = STORED_AS[spec.dtype]
        sizes = [size // np.dtype(dtype).itemsize for size in (spec.key_block_bytes, spec.value_block_bytes)]
        try:
            self.arrays = [_new_array((self.num_blocks, size), dtype, poison) for size in sizes * spec.num_places]
        except (OSError, OverflowError) as error:
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


def _new_array(shape: tuple[int, ...], dtype: type[Any], poison: bool) -> CacheArray:
    # Zeros that the system maps without touching memory: blocks take memory only when written. numpy.zeros would ask
    # for huge pages, and a first write that has to clear one takes a millisecond and more.
    count = math.prod(shape)
    mapping = mmap.mmap(-1, max(count * np.dtype(dtype).itemsize, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    array: CacheArray = np.frombuffer(mapping, dtype, count).reshape(shape)
    if poison:
        array[...] = POISON[dtype]
    return array
