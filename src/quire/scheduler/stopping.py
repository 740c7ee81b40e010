"""Stopping: ends a request at an end-of-sequence token, at a stop token, or at its maximum length.

Stop strings are found during detokenization, which then calls `Scheduler.stop`.

The hot path checks one condition per token: has `num_computed` reached `next_event`, or is the token in `stop_ids`?
Both are prepared here, so that length, block borders and `min_tokens` cost nothing in the steps between.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.request import FinishReason, Request


class Stopping:
    """Decides when requests end."""

    def __init__(self, eos_token_ids: frozenset[int], block_size: int) -> None:
        self._eos_token_ids = eos_token_ids
        self._block_size = block_size

    def arm(self, request: Request) -> None:
        """Set `stop_ids` and `next_event` for the next tokens. Mutates the request."""
        next_event = (request.num_computed // self._block_size + 1) * self._block_size
        next_event = min(next_event, request.max_total_tokens - 1)
        sampling = request.sampling
        if sampling.num_beams > 1:
            request.stop_ids = frozenset()  # the search itself ends beams
        elif request.num_output_tokens + 1 >= sampling.min_tokens:
            request.stop_ids = sampling.ending_tokens(self._eos_token_ids)
        else:
            request.stop_ids = frozenset()
            next_event = min(next_event, request.num_prompt_tokens + sampling.min_tokens - 2)
        request.next_event = next_event

    def reason_of_text(self, request: Request, token_ids: Sequence[int]) -> FinishReason:
        """Return why a beam search has ended a text of a request. Does not mutate."""
        ends = request.sampling.ending_tokens(self._eos_token_ids)
        return FinishReason.STOP if token_ids[-1] in ends else FinishReason.LENGTH

    def reason(self, request: Request) -> FinishReason | None:
        """Return why the request ends with its last token, or None if it continues. Does not mutate."""
        if request.num_output_tokens and request.tokens[-1] in request.stop_ids:
            return FinishReason.STOP
        if len(request.tokens) >= request.max_total_tokens:
            return FinishReason.LENGTH
        return None
