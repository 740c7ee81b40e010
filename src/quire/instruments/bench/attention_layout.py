"""Keys and values of many layers in paged memory, to time attention over them.

shuffled     ├ block ┼ block ┼ block ┼ block ┼ …    the blocks of all sequences, in random order
in order     ├ block ┼ block ┼ block ┼ block ┼ …    the blocks of sequence 0, then those of sequence 1
contiguous   ├ sequence 0 ───┼ sequence 1 ───┼ …    the same memory, each sequence in one block

The same kernel reads the same bytes in each case, so their place in physical memory makes no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.compute.arrays import IntArray
from quire.compute.worker.cache_engine import STORED_AS, CacheArray
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import INT4_GROUP, INT4_VALUES, KVCacheSpec

if TYPE_CHECKING:
    from quire._native import Kernels, ThreadTeam

PANEL_WIDTH = 16
COMMON = {"bfloat16": 0x3C00, "int8": 0x3C, "k8v4": 0x3C, "int4": 0x3C}
"""The content of every byte: 0.0078 in bfloat16; 60 in int8, with scales of 0.0115; 12 and 3 in 4 bits."""
SHUFFLED, IN_ORDER, CONTIGUOUS = "shuffled", "in order", "contiguous"


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys and values of each layer, [num_blocks, block_size, num_kv_heads, stored_dim], and the block tables."""

    layers: list[tuple[CacheArray, CacheArray]]
    tables: IntArray


class PagedLayers:
    """Sequences of equal length, with enough layers to fill `num_bytes` in bfloat16.

    `heads`: query heads, key heads, and their size. `dtype`: bfloat16, int8, k8v4 or int4.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        decodes: tuple[int, int],
        *,
        block_size: int,
        num_bytes: int,
        dtype: str = "bfloat16",
    ) -> None:
        num_sequences, num_tokens = decodes
        self._num_heads, num_kv_heads, self._head_dim = heads
        self._dtype = dtype
        blocks_each = -(-num_tokens // block_size)
        num_blocks = num_sequences * blocks_each
        step = INT4_GROUP if dtype in INT4_VALUES else PANEL_WIDTH
        stored_dim = -(-self._head_dim // step) * step
        spec, half = (
            KVCacheSpec.from_layers(
                [None], block_size=block_size, num_kv_heads=num_kv_heads, head_dim=stored_dim, dtype=stored_as
            )
            for stored_as in (dtype, "bfloat16")
        )
        number = STORED_AS[dtype]
        sizes = [size // np.dtype(number).itemsize for size in (spec.key_head_bytes, spec.value_head_bytes)]
        self.num_layers = max(1, -(-num_bytes // (num_blocks * half.bytes_per_block)))
        used = self._head_dim / stored_dim
        self.num_bytes = round(self.num_layers * num_sequences * num_tokens * spec.bytes_per_layer_token * used)
        try:
            # Write to the memory, so that the system maps it.
            pairs: list[list[CacheArray]] = [
                [np.full((num_blocks, block_size, num_kv_heads, size), COMMON[dtype], number) for size in sizes]
                for _ in range(self.num_layers)
            ]
        except MemoryError as error:
            raise InvalidConfigError("working set", num_bytes, "bytes that fit into memory") from error
        blocks = np.arange(num_blocks, dtype=np.int64).reshape(num_sequences, blocks_each)
        shuffled = np.random.default_rng(0).permutation(blocks.ravel()).reshape(blocks.shape)
        layers = [(keys, values) for keys, values in pairs]
        whole = (num_sequences, blocks_each * block_size, num_kv_heads, -1)
        pieces = [(keys.reshape(whole), values.reshape(whole)) for keys, values in layers]
        self.layouts = {
            SHUFFLED: Layout(layers, shuffled),
            IN_ORDER: Layout(layers, blocks),
            CONTIGUOUS: Layout(pieces, np.arange(num_sequences, dtype=np.int64).reshape(num_sequences, 1)),
        }
        self._lengths = np.full(num_sequences, num_tokens, np.int64)

    def attend(self, kernels: Kernels, team: ThreadTeam, layout: Layout, num_queries: int = 1) -> float:
        """Return the seconds of one pass over all layers for the newest tokens of each sequence. Does not mutate."""
        from quire._benchmarks import attention_seconds

        heads = self._num_heads, self._head_dim
        (seconds,) = attention_seconds(
            kernels, team, layout.layers, self._dtype, layout.tables, self._lengths, num_queries, *heads, 1
        )
        return seconds
