"""From a budget in bytes to a number of blocks.

    num_blocks = budget // bytes_per_block

All KV groups share one pool, so one division is enough.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import USUAL_BLOCK_SIZE, KVCacheSpec

MAX_TOKENS = 1 << 30
"""Longer than any sequence: the result if every layer stores only its window."""


def size_pool(budget_bytes: int, spec: KVCacheSpec) -> int:
    """Return how many blocks fit into a budget; raises `InvalidConfigError` if not even one fits.

    >>> from quire.core.kv_spec import KVGroup
    >>> spec = KVCacheSpec(16, num_kv_heads=8, head_dim=128, dtype="float16", groups=(KVGroup(tuple(range(32))),))
    >>> spec.bytes_per_block, size_pool(4 << 30, spec)      # Llama-3.1-8B: 2 MiB a block
    (2097152, 2048)
    """
    needed = spec.bytes_per_block
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int) or budget_bytes < needed:
        raise InvalidConfigError("kv_memory", budget_bytes, f"{needed} bytes (one block) or more")
    return budget_bytes // needed


def slots_to_grow_into(spec: KVCacheSpec) -> int:
    """Return the slots that are kept free for a running sequence: its next 16 tokens in each group, at most a block.

    >>> layers, heads = [None, 32], {"num_kv_heads": 1, "head_dim": 8, "dtype": "float32"}
    >>> [slots_to_grow_into(KVCacheSpec.from_layers(layers, block_size=size, **heads)) for size in (4, 16, 128)]
    [8, 32, 32]
    """
    return len(spec.groups) * min(USUAL_BLOCK_SIZE, spec.block_size)


def max_sequence_tokens(num_blocks: int, spec: KVCacheSpec, *, longest_chunk: int = 1) -> int:
    """Return how many tokens of a single sequence the blocks can hold when they hold nothing else.

    >>> spec = KVCacheSpec.from_layers([None], block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> max_sequence_tokens(4, spec)
    64
    """
    return _longest(lambda tokens: spec.num_blocks_for(tokens, longest_chunk=longest_chunk) <= num_blocks)


def max_beam_tokens(num_blocks: int, spec: KVCacheSpec, num_beams: int, num_prompt_tokens: int) -> int:
    """Return how many tokens each beam of one search can store when the blocks hold nothing else.

    Beams share the full blocks of their prompt in layers without a window, and may diverge right after these blocks.

    >>> spec = KVCacheSpec.from_layers([None], block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> max_beam_tokens(8, spec, num_beams=3, num_prompt_tokens=9)      # 2 shared, then 3 × 2
    16
    """

    def num_blocks_for(num_tokens: int) -> int:
        total = 0
        for group in spec.groups:
            blocks = spec.most_blocks(group, num_tokens)
            shared = min(blocks, num_prompt_tokens // spec.block_size) if group.window is None else 0
            total += shared + num_beams * (blocks - shared)
        return total

    return _longest(lambda num_tokens: num_blocks_for(num_tokens) <= num_blocks)


def _longest(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, given that all smaller ones fit; 0 if none fits."""
    low, high = 0, MAX_TOKENS + 1
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
