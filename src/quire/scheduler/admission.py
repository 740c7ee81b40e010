"""Admission: decides whether a waiting request may start now.

Over-admission makes engines thrash: prompts start chunk by chunk, fill the memory half-way, and preempt each other. So
while others run, a request is admitted only if

    its entire prompt  +  what running prompts still need  +  headroom   fits into the available blocks,

where headroom is room for the next 16 tokens of each running sequence, and a share of the pool; or if all of them fit
into the pool even at their maximum lengths, because then none will ever be preempted. In larger blocks, these tokens
rarely begin a new one: of a hundred sequences with blocks of 128, about twelve do. Layers with a sliding window
count with the most that they can hold at once: the window and the tokens of the steps in flight. The start-up table
counts the same way: its "sequences at once" are those that fit by the second rule.

If no request runs, no room must be kept, and requests that can never fit were refused when they were added: a request
must be able to finish when all others are preempted. Samples may preempt each other, but beams move together, so all
of them must fit at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from quire.core.config import SchedulerConfig
from quire.core.request import Request
from quire.core.validate import RequestLimits
from quire.memory.manager import KVCacheManager
from quire.memory.sequence import PrefixMatch
from quire.memory.sizing import max_beam_tokens, max_sequence_tokens, slots_to_grow_into
from quire.scheduler.running import num_rows_of

MAX_LENGTHS: Final = 4096
"""The lengths of sequences whose blocks are remembered."""


class Admission:
    """Keeps room for running requests."""

    def __init__(self, memory: KVCacheManager, config: SchedulerConfig) -> None:
        self._memory = memory
        self._slots_to_grow_into = slots_to_grow_into(memory.spec)
        self._headroom_blocks = math.ceil(config.headroom * memory.pool.num_blocks)
        self._longest_chunk = 1 + config.max_steps_under_way
        self._num_blocks_for = lru_cache(MAX_LENGTHS)(memory.spec.num_blocks_for)

    def limits_for(self, request: Request, limits: RequestLimits) -> RequestLimits:
        """Return the limits, reduced to lengths that certainly fit into the memory. Does not mutate."""
        num_blocks, spec, sampling = self._memory.pool.num_blocks, self._memory.spec, request.sampling
        longest = max_sequence_tokens(num_blocks, spec, longest_chunk=max(1, request.longest_image))
        if sampling.num_beams > 1:
            of_beam = max_beam_tokens(num_blocks, spec, sampling.num_sequences, request.num_prompt_tokens)
            longest = min(longest, of_beam)
        return replace(limits, max_sequence_tokens=min(longest, limits.max_sequence_tokens))

    def num_blocks_needed(self, request: Request, match: PrefixMatch | None = None) -> int:
        """Return how many available blocks a waiting request takes for its known tokens. Does not mutate."""
        return self._num_blocks_to_grow(request, len(request.tokens), match)

    def has_room(self, request: Request, num_blocks: int, running: Sequence[Request]) -> bool:
        """Return whether a request that needs `num_blocks` for its known tokens may start. Does not mutate."""
        return not running or self._fits_beside(num_blocks, running) or self.all_fit([*running, request])

    def _fits_beside(self, num_blocks: int, running: Sequence[Request]) -> bool:
        available = self._memory.pool.num_available
        kept = math.ceil(len(running) * self._slots_to_grow_into / self._memory.spec.block_size) + self._headroom_blocks
        if num_blocks + kept > available:
            return False
        owed = sum(
            self._num_blocks_to_grow(request, request.num_planned + request.backlog)
            for request in running
            if request.backlog > 1
        )
        return num_blocks + owed + kept <= available

    def _num_blocks_to_grow(self, request: Request, end: int, match: PrefixMatch | None = None) -> int:
        return self._memory.num_blocks_to_grow(request, end, match, longest_chunk=self._chunk_of(request))

    def _chunk_of(self, request: Request) -> int:
        """Return the tokens of a request that a step certainly may compute."""
        return max(self._longest_chunk, request.longest_image)

    def all_fit(self, requests: Sequence[Request]) -> bool:
        """Return whether the pool can hold all requests, and the sequences that they open, at full length. O(requests).

        Every block in use is in the table of a running request, so then each finds the blocks that it needs.
        """
        total = 0
        for request in requests:
            longest = request.max_total_tokens - 1  # the last token is never stored
            each = self._num_blocks_for(longest, longest_chunk=self._chunk_of(request))
            total += each * num_rows_of(request)
            if total > self._memory.pool.num_blocks:
                return False
        return True
