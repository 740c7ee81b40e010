"""Capacity: how many requests a pool of blocks holds at once, and which share of the slots holds tokens.

    grown      all requests at their full length, so none is ever preempted
    on average requests at every stage of their lives, long ones for longer: a busy server, whose admission keeps room
               for the next tokens of each running request, and some headroom

Shared blocks are not counted: with a common system prompt, more requests fit. For comparison, the number of requests
is given that would fit if each reserved the longest possible sequence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.core.kv_spec import KVCacheSpec
from quire.memory.sizing import slots_to_grow_into
from quire.simulate.lengths import RequestLengths
from quire.simulate.model_shape import num_pairs

LONGEST_CHUNK = 2
"""Tokens that a step can add to a sequence's window, with one step in flight."""

HEADROOM = 0.02
"""The scheduler's default for the share of the blocks that admission keeps free."""


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Concurrent requests, if all are as long as the median, the 95th percentile or the longest; and on average.

    `reserved`: the number if each reserved room for the longest possible sequence. `waste`: the average share of the
    used slots that holds no token and no state.
    """

    p50: int
    p95: int
    longest: int
    average: float
    reserved: int
    waste: float


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks that a request holds: at the median length, the 95th percentile, the longest, and on average.

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
        """Return the occupancy of requests of these lengths. O(requests)."""
        blocks, tokens = _mean_held(spec, lengths)

        def grown(share: float) -> int:
            return spec.num_blocks_for(lengths.total(share), longest_chunk=LONGEST_CHUNK)

        waste = 1 - tokens / (blocks * spec.block_size / len(spec.groups))
        return cls(spec, grown(0.5), grown(0.95), grown(1.0), blocks, waste)

    def blocks_for_one(self) -> int:
        """Return the fewest blocks for one average request, including the blocks that admission keeps free."""
        return math.ceil(self._blocks_per_request())

    def in_pool(self, num_blocks: int, reserved_tokens: int) -> Concurrency:
        """Return the requests that this many blocks hold; `reserved_tokens`: the longest possible sequence."""
        stored = max(1, reserved_tokens - 1)  # the last token's keys and values are not stored
        reserved = self.spec.num_blocks_for(stored, longest_chunk=LONGEST_CHUNK)
        return Concurrency(
            p50=num_blocks // self.p50,
            p95=num_blocks // self.p95,
            longest=num_blocks // self.longest,
            average=num_blocks / self._blocks_per_request(),
            reserved=num_blocks // reserved,
            waste=self.waste,
        )

    def _blocks_per_request(self) -> float:
        return (self.average + slots_to_grow_into(self.spec) / self.spec.block_size) / (1 - HEADROOM)


def _mean_held(spec: KVCacheSpec, lengths: RequestLengths) -> tuple[float, float]:
    """Return the blocks that a request holds and the tokens that it needs, on average over the steps of its output.

    Tokens are averaged over the groups of layers. A state counts as a block of tokens. O(requests × groups).
    """
    blocks, tokens, steps = 0, 0, 0
    for prompt, output in lengths.pairs:
        for group in spec.groups:
            blocks += _sum_of_blocks(prompt + output, spec.block_size, group.window)
            blocks -= _sum_of_blocks(prompt, spec.block_size, group.window)
            tokens += output * spec.block_size if group.recurrent else num_pairs(prompt, output, group.window)
        steps += output
    return blocks / steps, tokens / steps / len(spec.groups)


def _sum_of_blocks(num_tokens: int, block_size: int, window: int | None = None) -> int:
    """Return the sum of the blocks that a sequence holds at each length from 1 to `num_tokens`.

    With a window, blocks before those of the last step are given back.

    >>> [_sum_of_blocks(n, 4) for n in (4, 5, 8, 10)], [_sum_of_blocks(n, 4, 2) for n in (6, 7, 8, 10)]
    ([4, 6, 12, 18], [8, 9, 10, 14])
    """
    if num_tokens <= 0:
        return 0
    full, rest = divmod(num_tokens, block_size)
    taken = block_size * full * (full + 1) // 2 + rest * (full + 1)
    if window is None:
        return taken
    return taken - _sum_of_blocks(num_tokens - (window - 1 + LONGEST_CHUNK + block_size - 1), block_size)
