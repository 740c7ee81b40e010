"""From a budget in bytes to a number of blocks.

    num_blocks = budget // bytes_per_block

There is one budget and no hidden pool: what the blocks do not take is returned as a remainder, so that a start-up
table can add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import KVCacheSpec


@dataclass(frozen=True, slots=True)
class PoolSize:
    """How a budget divides into blocks."""

    num_blocks: int
    bytes_per_block: int
    remainder_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes that the blocks take."""
        return self.num_blocks * self.bytes_per_block


def size_pool(budget_bytes: int, spec: KVCacheSpec) -> PoolSize:
    """Return how many blocks fit into a budget; raises `InvalidConfigError` where not even one does.

    >>> from quire.core.kv_spec import KVGroup
    >>> spec = KVCacheSpec(16, num_kv_heads=8, head_dim=128, dtype="float16", groups=(KVGroup(tuple(range(32))),))
    >>> spec.bytes_per_block, size_pool(4 << 30, spec).num_blocks      # Llama-3.1-8B: 2 MiB a block
    (2097152, 2048)
    """
    needed = spec.bytes_per_block
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < needed:
        raise InvalidConfigError("kv_memory", budget_bytes, f"{needed} bytes (one block) or more")
    return PoolSize(budget_bytes // needed, needed, budget_bytes % needed)


def max_sequence_tokens(num_blocks: int, spec: KVCacheSpec, *, longest_chunk: int = 1) -> int:
    """Return how many tokens of a single sequence the blocks can hold when they hold nothing else.

    >>> spec = KVCacheSpec.from_layers([None], block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> max_sequence_tokens(4, spec)
    64
    """
    full_groups = sum(group.window is None for group in spec.groups)
    if not full_groups:
        unbounded = 1 << 30
        fits = spec.num_blocks_for(unbounded, longest_chunk=longest_chunk) <= num_blocks
        return unbounded if fits else _longest_below(unbounded, num_blocks, spec, longest_chunk)
    return _longest_below(num_blocks * spec.block_size, num_blocks, spec, longest_chunk)


def _longest_below(limit: int, num_blocks: int, spec: KVCacheSpec, longest_chunk: int) -> int:
    low, high = 0, limit + 1  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if spec.num_blocks_for(middle, longest_chunk=longest_chunk) <= num_blocks:
            low = middle
        else:
            high = middle
    return low
