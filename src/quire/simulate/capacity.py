"""Capacity: how many requests a pool of blocks holds at once, and which share holds tokens.

    grown      all requests at their full length: what can never fail
    on average requests at every stage of their lives, long ones for longer: what a busy server has, whose admission
               keeps a block free for each that runs, and some headroom

Blocks that sequences share are not counted: a common system prompt makes it more. What a reservation of the longest
possible sequence would hold in the same memory is given for comparison.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from quire.core.kv_spec import KVCacheSpec
from quire.simulate.lengths import RequestLengths
from quire.simulate.model_shape import num_pairs

LONGEST_CHUNK = 2
"""Tokens that a step may add to a sequence's window, with one step under way."""

HEADROOM = 0.02
"""The share of the blocks that admission keeps free, where the scheduler is told nothing else."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests at once, where all are as long as the median, the 95th percentile or the longest; and on average.

    `reserved`: how many there would be if each took room for the longest possible sequence. `waste`: the share of the
    slots taken that holds no token, on average.
    """

    p50: int
    p95: int
    longest: int
    average: float
    reserved: int
    waste: float


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that a request holds: at the median, the 95th percentile and the longest of lengths, and on average.

    >>> spec = KVCacheSpec.from_layers([None], block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    >>> occupancy = Occupancy.of(spec, RequestLengths(((90, 20), (400, 100))))
    >>> held = occupancy.in_pool(1000, reserved_tokens=2048)
    >>> held.p50, held.longest, held.reserved, round(held.average, 1), round(held.waste, 3)
    (142, 31, 7, 37.7, 0.019)
    """

    spec: KVCacheSpec
    p50: int
    p95: int
    longest: int
    average: float
    waste: float

    @classmethod
    def of(cls, spec: KVCacheSpec, lengths: RequestLengths) -> Occupancy:
        """Return what requests of these lengths hold. O(requests)."""
        blocks, tokens = _mean_held(spec, lengths)

        def grown(share: float) -> int:
            return spec.num_blocks_for(lengths.total(share), longest_chunk=LONGEST_CHUNK)

        waste = 1 - tokens / (blocks * spec.block_size / len(spec.groups))
        return cls(spec, grown(0.5), grown(0.95), grown(1.0), blocks, waste)

    def blocks_for_one(self) -> int:
        """Return the fewest blocks that hold one request on average, with what admission keeps free."""
        return math.ceil((self.average + len(self.spec.groups)) / (1 - HEADROOM))

    def in_pool(self, num_blocks: int, reserved_tokens: int) -> Concurrency:
        """Return how many requests this many blocks hold; `reserved_tokens`: the longest possible sequence."""
        stored = max(1, reserved_tokens - 1)  # of the last token nothing is stored
        reserved = self.spec.num_blocks_for(stored, longest_chunk=LONGEST_CHUNK)
        return Concurrency(
            p50=num_blocks // self.p50,
            p95=num_blocks // self.p95,
            longest=num_blocks // self.longest,
            average=(1 - HEADROOM) * num_blocks / (self.average + len(self.spec.groups)),
            reserved=num_blocks // reserved,
            waste=self.waste,
        )


def _mean_held(spec: KVCacheSpec, lengths: RequestLengths) -> tuple[float, float]:
    """Return the blocks that a request holds, and the tokens needed of them, on average over the steps of its output.

    Tokens are averaged over the groups of layers. O(requests × groups).
    """
    most = [
        replace(spec, groups=(group,)).num_blocks_for(1 << 40, longest_chunk=LONGEST_CHUNK) for group in spec.groups
    ]
    blocks, tokens, steps = 0, 0, 0
    for prompt, output in lengths.pairs:
        for group, most_blocks in zip(spec.groups, most, strict=True):
            blocks += _sum_of_blocks(prompt + output, spec.block_size, most_blocks)
            blocks -= _sum_of_blocks(prompt, spec.block_size, most_blocks)
            tokens += num_pairs(prompt, output, group.window)
        steps += output
    return blocks / steps, tokens / steps / len(spec.groups)


def _sum_of_blocks(num_tokens: int, block_size: int, most_blocks: int) -> int:
    """Return the blocks that a sequence holds at each of the lengths from 1 to `num_tokens`, added up.

    >>> [_sum_of_blocks(n, 4, 2) for n in (4, 5, 8, 10)]
    [4, 6, 12, 16]
    """
    growing = min(num_tokens, most_blocks * block_size)
    full, rest = divmod(growing, block_size)
    return block_size * full * (full + 1) // 2 + rest * (full + 1) + most_blocks * (num_tokens - growing)
