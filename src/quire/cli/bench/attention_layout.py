"""Keys and values of many layers in paged memory, for attention to be timed over them.

layer 0   ├ block ┼ block ┼ block ┼ …        in order:   sequence 0 has blocks 0, 1, 2, …, sequence 1 the next ones
layer 1   ├ block ┼ block ┼ block ┼ …        shuffled:   the same blocks, dealt out at random
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire.compute.arrays import IntArray
from quire.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from quire._native import Kernels, ThreadTeam

PANEL_WIDTH = 16
BFLOAT16_BYTES = 2


class PagedLayers:
    """Sequences of equal length in as many layers as take `num_bytes`; `heads`: of queries, of keys, and their size."""

    def __init__(
        self, heads: tuple[int, int, int], num_sequences: int, num_tokens: int, *, block_size: int, num_bytes: int
    ) -> None:
        self._num_heads, num_kv_heads, self._head_dim = heads
        blocks_each = -(-num_tokens // block_size)
        num_blocks = num_sequences * blocks_each
        stored_dim = -(-self._head_dim // PANEL_WIDTH) * PANEL_WIDTH
        shape = (num_blocks, block_size, num_kv_heads, stored_dim)
        bytes_per_layer = 2 * BFLOAT16_BYTES * num_blocks * block_size * num_kv_heads * stored_dim
        self.num_layers = max(1, -(-num_bytes // bytes_per_layer))
        self.num_bytes = (
            self.num_layers * 2 * BFLOAT16_BYTES * num_sequences * num_tokens * num_kv_heads * self._head_dim
        )
        try:
            # 0.0078 in bfloat16; written, so that the memory is there.
            self._layers = [
                (np.full(shape, 0x3C00, np.uint16), np.full(shape, 0x3C00, np.uint16)) for _ in range(self.num_layers)
            ]
        except MemoryError as error:
            raise InvalidConfigError("working set", num_bytes, "bytes that fit into memory") from error
        order = np.arange(num_blocks, dtype=np.int64)
        self.in_order: IntArray = order.reshape(num_sequences, blocks_each)
        self.shuffled: IntArray = np.random.default_rng(0).permutation(order).reshape(num_sequences, blocks_each)
        self._lengths = np.full(num_sequences, num_tokens, np.int64)

    def attend(self, kernels: Kernels, team: ThreadTeam, tables: IntArray, num_passes: int) -> list[float]:
        """Return the seconds of each pass over all layers. Does not mutate."""
        from quire._native import attention_seconds

        return attention_seconds(
            kernels, team, self._layers, tables, self._lengths, self._num_heads, self._head_dim, num_passes
        )
