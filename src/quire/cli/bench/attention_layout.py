"""Keys and values of many layers in paged memory, for attention to be timed over them.

shuffled     ├ block ┼ block ┼ block ┼ block ┼ …    the blocks of all sequences, dealt out at random
in order     ├ block ┼ block ┼ block ┼ block ┼ …    those of sequence 0, then those of sequence 1
contiguous   ├ sequence 0 ───┼ sequence 1 ───┼ …    the same memory, a sequence in one block of its own

All are read by the same kernel, and all are the same bytes: where the system has put them decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire.compute.arrays import HalfArray, IntArray
from quire.core.errors import InvalidConfigError

if TYPE_CHECKING:
    from quire._native import Kernels, ThreadTeam

PANEL_WIDTH = 16
BFLOAT16_BYTES = 2
SHUFFLED, IN_ORDER, CONTIGUOUS = "shuffled", "in order", "contiguous"


@dataclass(frozen=True, slots=True)
class Layout:
    """Keys and values of each layer, [num_blocks, block_size, num_kv_heads, stored_dim], and where sequences lie."""

    layers: list[tuple[HalfArray, HalfArray]]
    tables: IntArray


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
            layers = [
                (np.full(shape, 0x3C00, np.uint16), np.full(shape, 0x3C00, np.uint16)) for _ in range(self.num_layers)
            ]
        except MemoryError as error:
            raise InvalidConfigError("working set", num_bytes, "bytes that fit into memory") from error
        blocks = np.arange(num_blocks, dtype=np.int64).reshape(num_sequences, blocks_each)
        shuffled = np.random.default_rng(0).permutation(blocks.ravel()).reshape(blocks.shape)
        whole = (num_sequences, blocks_each * block_size, num_kv_heads, stored_dim)
        pieces = [(keys.reshape(whole), values.reshape(whole)) for keys, values in layers]
        self.layouts = {
            SHUFFLED: Layout(layers, shuffled),
            IN_ORDER: Layout(layers, blocks),
            CONTIGUOUS: Layout(pieces, np.arange(num_sequences, dtype=np.int64).reshape(num_sequences, 1)),
        }
        self._lengths = np.full(num_sequences, num_tokens, np.int64)

    def attend(self, kernels: Kernels, team: ThreadTeam, layout: Layout) -> float:
        """Return the seconds of one pass over all layers. Does not mutate."""
        from quire._native import attention_seconds

        (seconds,) = attention_seconds(
            kernels, team, layout.layers, layout.tables, self._lengths, self._num_heads, self._head_dim, 1
        )
        return seconds
