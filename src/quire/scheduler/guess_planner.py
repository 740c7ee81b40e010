"""GuessPlanner: requests guesses of the next tokens, and plans which guesses are verified.

The executor guesses: a plan requests guesses, the result has them, and the next plan of the request verifies them. The
budget decides how many pay (speculation.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from quire.core.config import SchedulerConfig
from quire.core.request import NO_DRAFTS, Request
from quire.core.step import StepResult
from quire.memory.manager import KVCacheManager
from quire.scheduler.groups import is_beam
from quire.scheduler.isolation import Isolation
from quire.scheduler.plan_builder import StepRecord
from quire.scheduler.running import RunningSet
from quire.scheduler.speculation import DraftBudget


class GuessPlanner:
    """Plans guesses, as a part of the scheduler."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVCacheManager,
        running: RunningSet,
        isolation: Isolation,
        budget: DraftBudget,
    ) -> None:
        self._budget = budget
        self._config, self._memory, self._running, self._isolation = config, memory, running, isolation

    def share_out(self) -> None:
        """Choose the guesses to verify next: none while a prompt is computed, which uses all arithmetic. Mutates."""
        running = self._running.requests
        if any(request.backlog > 1 for request in running):
            for request in running:
                request.drafts = NO_DRAFTS
        self._turn_to(running)
        self._budget.share_out(running, len(running))

    def ask(self, record: StepRecord) -> dict[int, int]:
        """Return the number of guesses to request for each row that generates one token at a time. Mutates."""
        # The position at which each continues if every guess in this step is wrong.
        asked = [(request, request.num_planned) for request in record.decodes]
        asked += [
            (each.request, each.request.num_planned - len(each.drafts)) for each in record.chunks if each.samples == 1
        ]
        has_steps_ahead = self._config.max_steps_under_way > 1
        proposals: dict[int, int] = {}
        running = self._running.requests
        if not self._budget.searches(len(running)) or any(request.backlog > 1 for request in running):
            return proposals  # guesses are not worth a search, or a prompt has priority
        for request, start in asked:
            most = min(self._config.max_drafts, request.max_total_tokens - 2 - start)
            if most <= 0 or is_beam(request) or self._isolation.is_under_way:
                continue
            proposals[request.row] = most
            record.asked[request.row] = request, request.generation
            if has_steps_ahead:
                request.awaits_drafts = True
                request.num_slots = 0
        return proposals

    def allow_depths(self, record: StepRecord) -> dict[int, int]:
        """Return for each row how many tokens the draft model may guess, given the room for their keys. Mutates."""
        running, depths = self._running.requests, dict[int, int]()
        asked = [request for request, _ in record.asked.values()]
        wanted = self._budget.depths(asked, len(running), self._config.max_depth) if asked else {}
        for request, most in wanted.items():
            num_slots, end = request.num_slots, min(request.num_planned + most, request.max_total_tokens - 1)
            # No request is preempted for a guess: each running request keeps a block to grow into.
            if self._memory.pool.num_available > len(running):
                self._memory.allocate_slots(request, end)
            request.num_slots = min(num_slots, request.num_slots)
            depth = min(end, self._memory.num_slots(request)) - request.num_planned
            if depth > 0:
                depths[request.row] = depth
        return depths

    def take(self, record: StepRecord, result: StepResult) -> None:
        """Record how the guesses of a step fared, and store the new ones. Mutates."""
        if record.requests and record.is_without_prompts:  # a step without requests is only for the disk
            self._note_times(record, result)
        for chunk, count in zip(record.chunks, result.num_tokens[len(record.decodes) :], strict=True):
            if chunk.drafts and count:
                self._budget.note_verified(chunk.request, len(chunk.drafts), count - 1)
        for row, (request, generation) in record.asked.items():
            if request.row == row and request.generation == generation:
                request.awaits_drafts = False
                guesses = result.proposals.get(row)
                request.drafts = NO_DRAFTS
                if guesses is not None:
                    request.guesser, request.drafts = guesses
                    request.num_slots = 0  # its next plan needs a decision

    def _turn_to(self, requests: Iterable[Request]) -> None:
        self._budget.turn_to(has_masks=any(request.sampling.grammar is not None for request in requests))

    def _note_times(self, record: StepRecord, result: StepResult) -> None:
        """Record how long a step took and how many tokens it brought, with or without guesses. Mutates."""
        self._turn_to(record.requests)
        num_requests, depths, is_search = len(record.requests), list(record.depths.values()), bool(record.asked)
        num_running = max(num_requests, len(self._running.requests))
        if not is_search and not record.chunks:
            self._budget.note_plain(num_requests, num_running, result.duration_us)
            return
        drafts = [(chunk.request, len(chunk.drafts)) for chunk in record.chunks if chunk.drafts]
        took_us = result.duration_us + max(depths, default=0) * result.draft_us
        self._budget.foresee(num_requests, drafts, depths, took_us=took_us, is_search=is_search)
        self._budget.note_step(num_requests, record.num_tokens, result.duration_us, is_search=is_search)
        self._budget.note_pass(len(depths), result.draft_us)
        self._budget.note_search(num_running, sum(result.num_tokens), took_us, is_search=is_search or bool(drafts))

    def take_guesses(self, request: Request, most: int) -> array[int]:
        """Return the guesses to verify now; they are used once. Mutates the request."""
        drafts, request.drafts = request.drafts, NO_DRAFTS
        if request.backlog != 1 or request.num_computed != request.num_planned:
            return NO_DRAFTS
        return drafts[: max(0, min(most, request.max_total_tokens - 2 - request.num_planned))]
