"""Admission: may this request start now?

Over-admission is how engines thrash: prompts start chunk by chunk, fill the memory half-way, and push each other out.
So a request is admitted beside others only if

    its whole prompt  +  what running prompts still need  +  headroom   fits into the available blocks,

where headroom is a block for each sequence that runs (the next tokens of everybody) and a share of the pool. With
nothing running there is nobody to keep room for, and what can never fit was refused at the door: a request must be
able to end when everybody else has yielded. Samples may yield to each other, but beams move together, so all of them
must fit beside each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from quire.core.request import Request
from quire.core.validate import RequestLimits
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_beam_tokens, max_sequence_tokens


class Admission:
    """Keeps room for those who run."""

    def __init__(self, memory: KVCacheManager, headroom: float) -> None:
        self._memory = memory
        self._headroom_blocks = math.ceil(headroom * memory.pool.num_blocks)

    def limits_for(self, request: Request, limits: RequestLimits) -> RequestLimits:
        """Return the limits narrowed to what surely fits into the memory. Does not mutate."""
        num_blocks, spec, sampling = self._memory.pool.num_blocks, self._memory.spec, request.sampling
        if sampling.num_beams > 1:
            longest = max_beam_tokens(num_blocks, spec, sampling.num_sequences, request.num_prompt_tokens)
        else:
            longest = max_sequence_tokens(num_blocks, spec)
        return replace(limits, max_sequence_tokens=min(longest, limits.max_sequence_tokens))

    def has_room(self, num_blocks: int, running: Sequence[Request]) -> bool:
        """Whether a request that needs so many blocks for its known tokens may start. Does not mutate."""
        if not running:
            return True
        available = self._memory.pool.num_available
        kept = len(running) * len(self._memory.spec.groups) + self._headroom_blocks
        if num_blocks + kept > available:
            return False
        owed = sum(
            self._memory.num_blocks_needed(request, request.num_planned + request.backlog)
            for request in running
            if request.backlog > 1
        )
        return num_blocks + owed + kept <= available
