"""StepCommitter: the second half of a step. It turns results into tokens, published blocks and finished requests.

A step in flight is kept as a `StepRecord`. Results arrive in the order of the plans. Most entries are plain decodes,
one token computed and one sampled, which `_commit_decodes` handles together. The others are handled one by one: chunks,
drafts, openings, beams, failures, and entries whose request was preempted or ended while the step was in flight (the
step is then *disturbed*).

    request at commit            computed tokens count    sampled token counts
    running, or swapped out      yes                      yes
    preempted by recompute       no, they are gone        yes: it was sampled correctly
    finished                     no                       no

The late result of an opening or of a step of beams is discarded: the leader opens the group again when it resumes, and
the search starts again. An entry that should sample and has no token is postponed: the next plan has its last token
again.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.core.errors import InvariantError
from quire.core.hypothesis import Hypothesis
from quire.core.logprobs import TokenLogprobs
from quire.core.request import FinishReason, Request
from quire.core.step import StepResult
from quire.memory.manager import KVCacheManager
from quire.scheduler.groups import choose_beams, is_beam, moving_together, open_group
from quire.scheduler.isolation import FailedStep
from quire.scheduler.plan_builder import Chunk, PlanBuilder, StepRecord
from quire.scheduler.running import RunningSet
from quire.scheduler.stopping import Stopping


@dataclass(slots=True)
class StepOutcome:
    """The outcome of a step. The tokens are in the requests."""

    advanced: list[Request]  # all requests of the step, with or without new tokens
    opened: list[Request] = field(default_factory=list)  # new sequences: samples of a prompt, forked beams
    finished: list[Request] = field(default_factory=list)


class Sampled(NamedTuple):
    """The tokens of one entry of a step and, if requested, their log-probabilities."""

    tokens: array[int]
    logprobs: tuple[TokenLogprobs, ...]

    def one(self, index: int) -> Sampled:
        """Return one of the tokens."""
        return Sampled(self.tokens[index : index + 1], self.logprobs[index : index + 1])


class StepCommitter:
    """Remembers the steps in flight and commits their results."""

    def __init__(
        self,
        memory: KVCacheManager,
        running: RunningSet,
        stopping: Stopping,
        finish: Callable[[Request, FinishReason], None],
    ) -> None:
        self._memory = memory
        self._running = running
        self._stopping = stopping
        self._finish = finish
        self._under_way: deque[StepRecord] = deque()
        self._num_steps = 0

    @property
    def num_under_way(self) -> int:
        """Steps in flight: their results have not arrived."""
        return len(self._under_way)

    @property
    def oldest(self) -> StepRecord | None:
        """The step whose result arrives next."""
        return self._under_way[0] if self._under_way else None

    def begin_step(self, step: PlanBuilder) -> StepRecord:
        """Remember a step that is about to be submitted. Mutates."""
        record = step.record(self._num_steps)
        self._num_steps += 1
        self._under_way.append(record)
        return record

    def disturb(self, request: Request) -> int:
        """Mark the steps in flight of a request that loses its row, and return their number. Mutates."""
        num_steps = 0
        for record in self._under_way:
            if request in record.decodes:
                record.generations.setdefault(request, request.generation)
            elif not any(chunk.request is request for chunk in record.chunks):
                continue
            record.disturbed = True
            num_steps += 1
        return num_steps

    def forget_steps(self) -> tuple[FailedStep, list[Request]]:
        """Drop the steps in flight, which were lost; return the oldest, which failed, and their requests. Mutates."""
        if not self._under_way:
            raise InvariantError("no step is in flight")
        failed = self._under_way[0]
        goals: dict[Request, int] = {}
        for chunk in failed.as_chunks():
            if not chunk.request.is_finished:
                is_decode = chunk.start < 0  # of the last known token: all tokens before it are committed
                end = chunk.start + chunk.num_tokens - len(chunk.drafts)
                goals[chunk.request] = len(chunk.request.tokens) if is_decode else end
        lost: dict[Request, None] = {}
        for record in self._under_way:
            for request in record.requests:
                if not request.is_finished:
                    lost |= dict.fromkeys(moving_together(request))
        self._under_way.clear()
        for request in lost:
            request.num_late_results = 0
        return FailedStep(goals, failed.num_tokens), list(lost)

    def update(self, result: StepResult) -> StepOutcome:
        """Commit the result of the oldest step in flight. Mutates."""
        if not self._under_way or self._under_way[0].step_id != result.step_id:
            raise InvariantError(f"the result of step {result.step_id} is not the expected one")
        record = self._under_way[0]
        requests = record.requests
        if len(result.num_tokens) != len(requests) or sum(result.num_tokens) != len(result.tokens):
            raise InvariantError(f"the result of step {result.step_id} does not fit its plan")
        self._under_way.popleft()
        outcome = StepOutcome(requests)
        num_decodes = len(record.decodes)
        if record.disturbed or result.failures or result.logprobs or 0 in result.num_tokens[:num_decodes]:
            self._commit_chunks(record.as_chunks(), result, 0, outcome)
        else:
            self._commit_decodes(record.decodes, result.tokens, outcome)
            if record.chunks:
                self._commit_chunks(record.chunks, result, num_decodes, outcome)
        return outcome

    def _commit_decodes(self, decodes: list[Request], tokens: array[int], outcome: StepOutcome) -> None:
        """Commit plain decodes, the fast path. They are first in a plan, so their tokens are first in the result."""
        eventful = []
        for request, token in zip(decodes, tokens, strict=False):
            request.tokens.append(token)
            computed = request.num_computed + 1
            request.num_computed = computed
            if computed >= request.next_event or token in request.stop_ids:
                eventful.append(request)
        for request in eventful:
            self._settle(request, self._stopping.reason(request), outcome)

    def _commit_chunks(self, chunks: list[Chunk], result: StepResult, first: int, outcome: StepOutcome) -> None:
        """Commit the entries `first` … of the plan one by one."""
        at = sum(result.num_tokens[:first])
        searches: dict[str, list[tuple[Chunk, int, Sampled]]] = {}
        for index, chunk in enumerate(chunks, start=first):
            tokens = result.tokens[at : at + result.num_tokens[index]]
            at += len(tokens)
            sampled = Sampled(tokens, result.logprobs.get(chunk.row, ()))
            request = chunk.request
            if request.num_late_results:
                request.num_late_results -= 1
            if request.is_finished:
                continue
            if chunk.row in result.failures:
                self._fail(request, result.failures[chunk.row], outcome)
                continue
            if chunk.row in result.prompt_logprobs:
                note_prompt(request, chunk.start, result.prompt_logprobs[chunk.row])
            if chunk.generation != request.generation and request.sampling.num_beams > 1:
                continue  # the search has started again meanwhile
            elif is_beam(request) and chunk.samples:
                parent = result.parents[index] if result.parents else chunk.row
                searches.setdefault(request.request_id, []).append((chunk, parent, sampled))
            elif chunk.samples and not tokens and chunk.row not in result.searches:
                self._postpone(chunk)
            elif request.pooling is not None:
                self._commit_pooled(chunk, result.vectors.get(chunk.row), outcome)
            elif chunk.samples > 1:
                self._open(chunk, sampled, result.searches.get(chunk.row), outcome)
            else:
                self._commit_chunk(chunk, sampled, outcome)
        for steps in searches.values():
            self._commit_beams(steps, result.searches, outcome)

    def _commit_chunk(self, chunk: Chunk, sampled: Sampled, outcome: StepOutcome) -> None:
        request = chunk.request
        num_known = len(request.tokens)
        reason = self._append(request, sampled)
        num_new = len(request.tokens) - num_known  # drafts beyond the token that ends the request do not count
        if chunk.generation != request.generation:
            request.backlog += num_new
        elif chunk.drafts:
            request.num_computed += num_new
            request.num_planned = request.num_computed
            request.backlog = 1
        else:
            request.num_computed += chunk.num_tokens
        self._settle(request, reason, outcome)

    def _commit_pooled(self, chunk: Chunk, vector: bytes | None, outcome: StepOutcome) -> None:
        """Commit a chunk of a pooled request, which ends when its last token is computed."""
        request = chunk.request
        if chunk.generation != request.generation:
            return
        request.num_computed += chunk.num_tokens
        if request.num_computed < len(request.tokens):
            self._settle(request, None, outcome)
        elif vector is None:
            raise InvariantError(f"request {request.request_id!r} is computed, but there is no vector")
        else:
            request.vector = vector
            self._settle(request, FinishReason.STOP, outcome)

    def _append(self, request: Request, sampled: Sampled) -> FinishReason | None:
        """Append tokens up to the one that ends the request; return why it ends, or None if it continues."""
        for index, token in enumerate(sampled.tokens):
            request.tokens.append(token)
            request.logprobs += sampled.logprobs[index : index + 1]
            reason = self._stopping.reason(request)
            if reason is not None:
                return reason
            self._stopping.arm(request)
        return None

    def _settle(self, request: Request, reason: FinishReason | None, outcome: StepOutcome) -> None:
        """Publish the blocks that became full, and end the request or arm it for its next event."""
        if request.row >= 0:
            self._memory.commit(request, request.num_computed)
        if reason is None:
            self._stopping.arm(request)
        else:
            self._finish(request, reason)
            outcome.finished.append(request)

    def _fail(self, request: Request, message: str, outcome: StepOutcome) -> None:
        for member in moving_together(request):
            member.error = message
            self._finish(member, FinishReason.ERROR)
            outcome.finished.append(member)

    def _postpone(self, chunk: Chunk) -> None:
        """Undo a step whose token the executor could not sample yet, and disregard later steps of the request.

        It is unknown when it can sample, so no other request should wait for the block that this one is computing.
        """
        request = chunk.request
        if chunk.generation != request.generation:
            return
        self._undo(chunk)
        if request.row >= 0:
            self._memory.commit(request, request.num_computed)
            self._memory.withdraw(request)
        if self.disturb(request):
            request.generation += 1
            request.awaits_drafts = False  # guesses of the later steps do not count

    def _undo(self, chunk: Chunk) -> None:
        """Undo a step that does not count: its last token must be computed again."""
        request = chunk.request
        if chunk.generation == request.generation:
            request.num_computed += chunk.num_tokens - len(chunk.drafts) - 1
            request.num_planned = request.num_computed
            request.backlog = 1

    def _open(self, chunk: Chunk, sampled: Sampled, texts: tuple[Hypothesis, ...] | None, outcome: StepOutcome) -> None:
        leader = chunk.request
        if leader.row < 0 or chunk.generation != leader.generation:
            self._undo(chunk)
            return
        if texts is None and len(sampled.tokens) != chunk.samples:
            raise InvariantError(f"request {leader.request_id!r} opened into {len(sampled.tokens)} sequences")
        leader.num_computed += chunk.num_tokens
        opened = open_group(leader, self._memory, self._running)
        outcome.opened += opened
        if texts is not None:
            self._end_search([leader, *opened], texts, outcome)
            return
        for index, request in enumerate([leader, *opened]):
            request.backlog = 1
            reason = self._append(request, sampled.one(index))
            self._settle(request, reason, outcome)

    def _commit_beams(
        self,
        steps: list[tuple[Chunk, int, Sampled]],
        searches: dict[int, tuple[Hypothesis, ...]],
        outcome: StepOutcome,
    ) -> None:
        chunks = [chunk for chunk, _, _ in steps]
        if chunks[0].request.is_finished:  # another beam of the search failed in the same step
            return
        for chunk in chunks:
            chunk.request.num_computed += chunk.num_tokens
        texts = next((searches[chunk.row] for chunk in chunks if chunk.row in searches), None)
        if texts is not None:
            for chunk in chunks:
                self._memory.commit(chunk.request, chunk.request.num_computed)
            self._end_search([chunk.request for chunk in chunks], texts, outcome)
            return
        before = {chunk.row: chunk.request for chunk in chunks}
        parents = {chunk.row: parent for chunk, parent, _ in steps}
        beams = choose_beams(chunks, parents, self._memory, self._running)
        for chunk, _, sampled in steps:
            beam = beams[chunk.row]
            if beam is not before[chunk.row]:
                outcome.opened.append(beam)
            beam.backlog = 1
            reason = self._append(beam, sampled)
            self._settle(beam, reason, outcome)

    def _end_search(self, beams: list[Request], texts: tuple[Hypothesis, ...], outcome: StepOutcome) -> None:
        """End the beams of a search that is over; each gets one of the search's texts, the best the lowest branch."""
        if len(texts) != len(beams):
            raise InvariantError(f"request {beams[0].request_id!r}: {len(beams)} beams but {len(texts)} texts")
        for beam, text in zip(sorted(beams, key=lambda beam: beam.branch), texts, strict=True):
            self._finish(beam, self._stopping.reason_of_text(beam, text.token_ids))
            beam.tokens[beam.num_prompt_tokens :] = array("i", text.token_ids)
            beam.cumulative_logprob = text.cumulative_logprob
            outcome.finished.append(beam)


def note_prompt(request: Request, start: int, entries: tuple[TokenLogprobs, ...]) -> None:
    """Store log-probabilities of the prompt, by position: after a preemption they are reported again. Mutates."""
    if start > len(request.prompt_logprobs):
        raise InvariantError(f"request {request.request_id!r}: the prompt log-probabilities before {start} are missing")
    request.prompt_logprobs[start : start + len(entries)] = entries
