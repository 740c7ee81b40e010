"""The scheduler: continuous batching with chunked prefill, and no phases.

Requests join and leave the batch between any two steps. Each step gives every running request a number of tokens to
compute: its backlog, as far as the token budget goes. A chunk of a long prompt, the rest of a prompt after a prefix
hit, a decode and the verification of drafts differ only in that number.

    add ──► waiting ──admit──► running ──schedule──► plan ──► executor ──► result ──update──► tokens, or the end
               ▲                  │
               └──── preempt ─────┘  when the blocks run out: the last in order, never the first

`schedule` reserves and plans; `update` (its other half, in commit.py) commits: it appends tokens, publishes full blocks
and ends requests. Several steps may be in flight. A chunk of a prompt leaves one token of the budget to each other
running request, so that a long prompt never stalls them.

If the tokens of a model attend to later ones (`RequestLimits.one_step`), a text has no chunks: it waits for a step with
room for all its tokens, and an empty step takes it whatever its length, which is at most that of the largest step.

Progress: running requests are in the order of the policy, later ones make room for earlier ones, and requests that
could never fit were refused. So the first in order always gets room and finishes, and then the next is first. A policy
may also take rows for a newcomer, but never the row of the first.

Separate parts decide about the order (policy/), admission, preemption, stopping, isolation after a failed step,
guessing (guess_planner.py), and how many guessed tokens are verified (speculation.py).
"""

from __future__ import annotations

from array import array
from typing import Final

from quire.core.config import SchedulerConfig
from quire.core.errors import (
    ExecutionError,
    InvalidRequestError,
    InvariantError,
    OutOfMemoryError,
    RequestStateError,
    UnknownRequestError,
)
from quire.core.request import NO_DRAFTS, FinishReason, Request, RequestGroup, RequestStatus
from quire.core.step import StepPlan, StepResult
from quire.core.validate import RequestLimits, max_total_tokens, validate, validate_length
from quire.memory.manager import KVCacheManager
from quire.memory.sequence import Frontier
from quire.scheduler.admission import Admission
from quire.scheduler.commit import StepCommitter, StepOutcome
from quire.scheduler.groups import is_beam, moving_together
from quire.scheduler.guess_planner import GuessPlanner
from quire.scheduler.isolation import Isolation
from quire.scheduler.journal import RequestJournal
from quire.scheduler.plan_builder import PlanBuilder
from quire.scheduler.policy import create_policy
from quire.scheduler.preemption import Preemption
from quire.scheduler.running import RunningSet
from quire.scheduler.speculation import DraftBudget
from quire.scheduler.stopping import Stopping

OLDER: Final = 1 << 62


class Scheduler:
    """Decides what each step computes. Owns the progress of requests; the memory manager owns the blocks."""

    def __init__(self, config: SchedulerConfig, memory: KVCacheManager, limits: RequestLimits) -> None:
        self.config = config
        self.memory = memory
        self.limits = limits
        self.requests: dict[str, Request] = {}  # by id, until they end; of a group, the leader
        self.isolation = Isolation(config.max_num_batched_tokens)
        self.prompt_limit: int | None = None  # the most prompt tokens of a step while others generate
        self._policy = create_policy(config)
        self._waiting = self._policy.make_queue()
        self._running = RunningSet(config.max_num_seqs, self._policy)
        self._admission = Admission(memory, config)
        self._stopping = Stopping(frozenset(limits.eos_token_ids), memory.spec.block_size)
        self._committer = StepCommitter(memory, self._running, self._stopping, self._finish)
        self._preemption = Preemption(memory, config, self._committer, self._running, self._waiting)
        self.drafts = DraftBudget()
        self._guesses = GuessPlanner(config, memory, self._running, self.isolation, self.drafts)
        self._awaited: dict[Request, Frontier] = {}  # waiting for a block that another request computes
        self._short_of: tuple[Request, int] | None = None  # the request that did not fit, and the blocks it needed
        self._next_in_turn: Request | None = None  # the request that found no row, or no tokens, in the last step
        self._num_added = 0
        self._journal: RequestJournal | None = None  # while a client watches

    # ---- requests in and out ----------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Add a request; raises `InvalidRequestError` if it can never be served. Mutates."""
        if request.status is not RequestStatus.WAITING:
            raise RequestStateError(f"request {request.request_id!r} has run already; make a new one")
        validate(request, self.limits)
        limits = self._admission.limits_for(request, self.limits)
        validate_length(request, limits)
        if request.request_id in self.requests:
            raise InvalidRequestError("request_id", request.request_id, "an id that no other request uses")
        # A request that began in another engine is older than all that begin here.
        request.serial = self._num_added - (OLDER if request.num_output_tokens else 0)
        self._num_added += 1
        request.name_tokens(self.memory.spec.block_size)
        request.max_total_tokens = max_total_tokens(request, limits)
        if request.sampling.num_sequences > 1:
            request.group = RequestGroup(request)
        self.requests[request.request_id] = request
        self._waiting.add(request)
        if self._journal is not None:
            self._journal.note_waiting(request)

    def abort(self, request_id: str) -> None:
        """End a request and all sequences of its group, in any state. Mutates."""
        for member in self._members(request_id):
            self._finish(member, FinishReason.ABORT)

    def fail(self, request_id: str, message: str) -> None:
        """End a request and all its sequences with an error, and drop the cached blocks that it computed. Mutates."""
        for member in self._members(request_id):
            member.error = message
            self._finish(member, FinishReason.ERROR)

    def stop(self, request_id: str, branch: int = 0) -> None:
        """End one sequence because its text reached a stop string; a beam cannot be ended alone. Mutates."""
        for member in self._members(request_id):
            if is_beam(member):
                raise RequestStateError(f"request {request_id!r} is a beam search, whose beams cannot be stopped")
            if member.branch == branch:
                self._finish(member, FinishReason.STOP)

    def await_images(self, request_id: str, is_waiting: bool) -> None:
        """Let a request start only once its images are encoded; or they are: let it start. Mutates."""
        for member in self._members(request_id):
            member.awaits_images = is_waiting

    def lose_steps(self, error: ExecutionError) -> list[Request]:
        """Preempt all requests of the steps in flight, which the executor lost, to isolate the fault. Mutates.

        Returns the sequences that end with the error: those of the request at fault, once it is known (isolation.py).
        """
        failed, lost = self._committer.forget_steps()
        culprit = self.isolation.note_failure(failed, out_of_memory=isinstance(error, OutOfMemoryError))
        ended: list[Request] = []
        if culprit is not None:
            ended = self._members(culprit)
            self.fail(culprit, str(error))
        self._preemption.set_back(lost)
        for request in lost:
            if request.status is RequestStatus.SWAPPED:  # its blocks lack tokens that the lost steps should compute
                self._preemption.forget(request)
        return ended

    def _members(self, request_id: str) -> list[Request]:
        """Return the sequences of a request that have not ended."""
        if request_id not in self.requests:
            raise UnknownRequestError(request_id)
        leader = self.requests[request_id]
        members = leader.group.members if leader.group else [leader]
        return [member for member in members if not member.is_finished]

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state, and free its memory. Its full blocks stay cached, unless it failed."""
        self._committer.disturb(request)
        if request.row >= 0:
            self._running.leave(request)
        else:
            self._waiting.remove(request)
            self._awaited.pop(request, None)
            self.memory.disk.end_loads(request)
        has_run = request in self.memory.memories or request.num_preemptions > 0
        if reason is FinishReason.ERROR and has_run:
            self.memory.drop(request)
        elif request in self.memory.memories:
            self.memory.free(request)
        request.finish_reason = reason
        request.become(RequestStatus.FINISHED)
        self.drafts.forget(request)
        if self._journal is not None:
            self._journal.note_ended(request, reason)
        members = request.group.members if request.group else [request]
        if all(member.is_finished for member in members):
            del self.requests[request.request_id]
        self.isolation.note_ended(request)

    def watch(self) -> RequestJournal:
        """Start a new journal of what happens to requests; it replaces the previous one. Mutates."""
        alive = [member for request_id in self.requests for member in self._members(request_id)]
        self._journal = self._preemption.journal = RequestJournal(alive)
        return self._journal

    def unwatch(self) -> None:
        """End the journal. Mutates."""
        self._journal = self._preemption.journal = None

    @property
    def num_preemptions(self) -> int:
        """How often a running request was preempted for another; preemptions after a failure do not count."""
        return self._preemption.num_preemptions

    @property
    def num_waiting(self) -> int:
        """The number of requests that hold no row."""
        return len(self._waiting)

    @property
    def running(self) -> list[Request]:
        """The requests that hold a row, in order."""
        return list(self._running.requests)

    @property
    def num_steps_under_way(self) -> int:
        """The number of plans whose results have not arrived."""
        return self._committer.num_under_way

    # ---- planning ---------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Plan a step; None if there is nothing to do now. Mutates; O(running) plus what it allocates."""
        if self.isolation.is_under_way:
            if self._committer.num_under_way:
                return None  # one step at a time, so that a failure belongs to the requests on trial
            self._make_place_on_trial()
        newcomer, running = self._make_way(), self._running.requests
        if self.config.max_drafts:
            self._guesses.share_out()
        budget = self._token_budget(running)
        step = PlanBuilder(budget, self._policy.token_shares(newcomer, budget - len(running), running))
        preemptions = self.num_preemptions
        self._plan_running(step)
        if self.num_preemptions == preemptions and len(self._waiting):
            self._admit_waiting(step)
        is_idle = not step.decodes and not step.chunks and not self.memory.has_moves
        is_waiting = is_idle and bool(self.memory.disk.landings)
        if is_idle and (self._committer.num_under_way or not (is_waiting or self.memory.has_transfers)):
            return None
        record = self._committer.begin_step(step)
        self._policy.charge(record)
        starting, released = self._running.take_differences()
        proposals = self._guesses.ask(record) if self.config.max_drafts else {}
        if self.config.max_depth:
            record.depths = self._guesses.allow_depths(record)
        return step.plan(record, self.memory.take_changes(is_waiting), starting, released, proposals)

    def update(self, result: StepResult) -> StepOutcome:
        """Commit the oldest step in flight: append its tokens, publish full blocks, end requests. Mutates."""
        record = self._committer.oldest
        outcome = self._committer.update(result)
        if record is not None:
            self.memory.note_step(record.num_tokens, result.duration_us, result.transfers)
        if record is not None and self.config.max_drafts:
            self._guesses.take(record, result)
        self.isolation.note_success(outcome.advanced)
        return outcome

    def _token_budget(self, running: list[Request]) -> int:
        """Return how many tokens the next step may compute: at least one for each running request."""
        most = max(self.isolation.max_step_tokens, len(running))
        if self.prompt_limit is not None:
            for request in running:
                if request.backlog == 1:
                    return min(most, len(running) + self.prompt_limit)
        return most

    def _plan_running(self, step: PlanBuilder) -> None:
        add_decode, add_start = step.decodes.append, step.decode_starts.append
        # Meanwhile, only requests after the current one may leave the list.
        for place, request in enumerate(self._running.requests, start=1):
            start = request.num_planned
            if request.backlog == 1 and start < request.num_slots:
                request.num_planned = start + 1
                add_decode(request)
                add_start(start)
            elif request.backlog and not self._plan_one(step, request, place):
                break

    def _plan_one(self, step: PlanBuilder, request: Request, place: int) -> bool:
        """Plan a request that needs a decision; False if the request itself was preempted. `place`: the next index."""
        if request.awaits_drafts:
            return True
        left = step.num_tokens_left - (len(self._running.requests) - place)
        if is_beam(request):
            return self._plan_beams(step, request, place, left)
        count = min(request.backlog, left, request.max_total_tokens - 1 - request.num_planned)
        count = step.most_tokens(request, request.num_planned, step.within_share(request, count))
        if request.images and count > 0:
            count = step.unsplit(request, request.num_planned, count)
        if count <= 0:
            return True
        drafts = self._guesses.take_guesses(request, left - 1) if request.drafts else NO_DRAFTS
        if drafts and self.memory.allocate_slots(request, request.num_planned + 1 + len(drafts)):
            self._add_tokens(step, request, 1, drafts)
            return True
        count = self._make_room(step, request, count, place)
        if count:
            self._add_tokens(step, request, count)
        return request.row >= 0

    def _make_room(self, step: PlanBuilder, request: Request, count: int, place: int) -> int:
        """Allocate slots for up to `count` tokens, preempting later requests; return how many, 0: no room now."""
        while not self.memory.allocate_slots(request, request.num_planned + count):
            if self.memory.disk.give_up_loads():
                continue
            if self.memory.has_windows and self._admission.all_fit(self._running.requests):
                # Only chunks take the room: their blocks beyond the windows are freed once they are computed.
                if self.memory.give_back():
                    continue
                if request.halved(request.num_planned, count):
                    count = request.halved(request.num_planned, count)
                    continue
                if step.decodes or step.chunks or self._committer.num_under_way:
                    return 0
            candidates = self._running.requests[place:]
            if is_beam(request):
                candidates = [other for other in candidates if other.group is not request.group]
            if candidates:
                self._preemption.preempt(self._policy.victim(candidates))
            elif smaller := request.halved(request.num_planned, count):
                count = smaller
            else:
                first = self._running.requests[0]
                if first is not request and first not in moving_together(request):
                    self._preemption.preempt(request)
                return 0
        return count

    def _add_tokens(self, step: PlanBuilder, request: Request, count: int, drafts: array[int] = NO_DRAFTS) -> None:
        """Add tokens of a request, which have slots, to the step."""
        request.backlog -= count
        samples, group, beam = 0, request.group, is_beam(request)
        if not request.backlog and request.pooling is None:
            samples = 1 if group is None or group.opened else group.num_sequences
            if samples == 1 and not drafts and not beam:
                request.backlog = 1  # the token being sampled; otherwise the result decides what is next
        if samples == 1 == count and not drafts and not beam:
            step.decodes.append(request)
            step.decode_starts.append(request.num_planned)
        else:
            step.add_chunk(request, count + len(drafts), samples, drafts)
        request.num_planned += count + len(drafts)
        decide_each_time = beam or request.pooling is not None or (group is not None and not group.opened)
        request.num_slots = 0 if decide_each_time else min(request.num_slots, request.max_total_tokens - 1)

    def _plan_beams(self, step: PlanBuilder, request: Request, place: int, left: int) -> bool:
        """Plan the last token of all beams of a search, if this is the first beam; False if they were preempted."""
        beams = moving_together(request)
        if request is not beams[0] or left < 1:
            return True
        for beam in beams:  # all free their blocks behind the windows before one of them allocates
            self.memory.allocate_slots(beam, beam.num_planned)
        if all(self._make_room(step, beam, 1, place) for beam in beams):
            for beam in beams:
                self._add_tokens(step, beam, 1)
        for beam in beams:
            beam.num_slots = 0  # decided again in every step
        return request.row >= 0

    def _make_place_on_trial(self) -> None:
        """Preempt the requests on trial that got past the failure; after the last trial, let them continue. Mutates."""
        isolation = self.isolation
        passed = [request for request in self.running if all(map(isolation.has_passed, moving_together(request)))]
        for request in passed:
            isolation.note_passed(request)
        if isolation.is_under_way:
            self._preemption.set_back(passed)

    # ---- admission --------------------------------------------------------------------------------------------

    def _make_way(self) -> Request | None:
        """Free rows for the next in turn, if the policy does so; return it if it can start in this step. Mutates."""
        newcomer, self._next_in_turn = self._next_in_turn, None
        if newcomer is None or newcomer.is_finished or self.isolation.is_under_way or self._lacks_room(newcomer):
            return None
        running, most = self._running, self.isolation.max_step_tokens
        num_rows = running.num_rows_short(newcomer, most)
        if num_rows:
            yielding = self._policy.rows_for(newcomer, num_rows, running.requests)
            needed = self.memory.spec.num_blocks_for(len(newcomer.tokens))  # or fewer, if some are cached
            if yielding and self._admission.has_room(newcomer, needed, running.requests):
                for request in yielding:
                    self._preemption.preempt(request)
        return None if running.num_rows_short(newcomer, most) else newcomer

    def _lacks_room(self, request: Request) -> bool:
        """Return whether the request did not fit into the memory in its last turn, and still does not fit."""
        short_of = self._short_of
        if short_of is None or short_of[0] is not request:
            return False
        return not self._admission.has_room(request, short_of[1], self._running.requests)

    def _admit_waiting(self, step: PlanBuilder) -> None:
        admitted: list[Request] = []
        num_passed_over, most = 0, self.isolation.max_step_tokens
        for request in self._waiting.in_turn():
            if num_passed_over > self.config.max_num_seqs:
                break
            if self.isolation.holds_back(request) or request.awaits_images:
                continue
            if request.num_late_results or self._awaits_commit(request):
                num_passed_over += 1
            elif not self._has_tokens_for(request, step) or self._running.num_rows_short(request, most):
                self._next_in_turn = request
                break
            elif not self._admit(step, request):
                break
            elif request.row >= 0:
                admitted.append(request)
            else:
                num_passed_over += 1
        for request in admitted:
            self._waiting.remove(request)

    def _has_tokens_for(self, request: Request, step: PlanBuilder) -> bool:
        """Return whether the step may compute tokens of the request: all of them, if the model needs them at once."""
        left = step.num_tokens_left
        if self.limits.one_step:
            return len(request.tokens) <= left or not step.chunks
        return left > 0

    def _awaits_commit(self, request: Request) -> bool:
        """Return whether a block that the request waits for is still being computed, or loaded."""
        if self.memory.disk.landings.of(request) is not None:
            return True
        frontier = self._awaited.get(request)
        if frontier is None or self.memory.is_being_computed(frontier):
            return frontier is not None
        del self._awaited[request]
        return False

    def _admit(self, step: PlanBuilder, request: Request) -> bool:
        """Start or resume a waiting request, or let it wait for a block that is being computed; False: no room."""
        memory, running, known = self.memory, self._running.requests, len(request.tokens)
        if self._lacks_room(request):
            return False
        self._short_of = None
        match = None if request.status is RequestStatus.SWAPPED else memory.match_prefix(request)
        if match is not None and match.frontier is not None and memory.is_being_computed(match.frontier):
            self._awaited[request] = match.frontier
            return True
        needed = self._admission.num_blocks_needed(request, match)
        if not self._admission.has_room(request, needed, running):
            self._short_of = (request, needed)
            return False
        if match is not None and memory.start_load(request, match):
            return True
        start = request.num_planned if match is None else match.num_tokens
        count = known - start if self.limits.one_step else min(known - start, step.num_tokens_left)
        least, count = count if self.limits.one_step else 1, step.most_tokens(request, start, count)
        if request.images:
            count = step.unsplit(request, start, count)
        if not step.most_tokens(request, start, min(1, count)):
            return False
        if match is None:
            if not memory.swap_in(request):
                return False
            while count and not memory.allocate_slots(request, start + count):
                count = request.halved(start, count)
        else:
            while not memory.allocate_slots(request, start + count, match):
                if count <= least or not request.halved(start, count):
                    return False
                count = request.halved(start, count)
        self._start_running(request, start)
        if count:
            self._add_tokens(step, request, count)
        return True

    def _start_running(self, request: Request, start: int) -> None:
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = start
            request.num_host_tokens, request.num_disk_tokens = self.memory.note_hits(request, start)
        self.memory.disk.end_loads(request)
        request.num_computed = request.num_planned = start
        request.backlog = len(request.tokens) - start
        request.num_slots = 0
        request.drafts, request.awaits_drafts = NO_DRAFTS, False
        request.become(RequestStatus.RUNNING)
        if self._journal is not None:
            self._journal.note_admitted(request)
        self._running.start(request)
        self._stopping.arm(request)

    def check(self) -> None:
        """Raise `InvariantError` unless requests, rows, queues and memory agree. O(everything)."""
        self.memory.check()
        self._running.check(self.config.max_num_seqs)
        waiting = list(self._waiting.in_turn())
        self.isolation.check(self._running.requests, self.requests)
        known = {
            member
            for leader in self.requests.values()
            for member in (leader.group.members if leader.group else [leader])
            if not member.is_finished
        }
        if known != set(waiting) | set(self._running.requests) or len(known) != len(waiting) + len(self.running):
            raise InvariantError("a request is in two places, or in none")
        for request in known:
            request.check()
            if len({member.row >= 0 for member in moving_together(request)}) > 1:
                raise InvariantError(f"some beams of request {request.request_id!r} run and some wait")
        holders = {request for request in known if request.status in (RequestStatus.RUNNING, RequestStatus.SWAPPED)}
        if holders != set(self.memory.memories):
            raise InvariantError("a request holds memory but is neither running nor swapped out")
