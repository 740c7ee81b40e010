"""ContiguousEngine: engines before paging. A sequence gets one run of memory when it starts, for its maximum length.

    reserves   max      the longest sequence that the model allows           Orca (Max), FasterTransformer
               pow2     its prompt, and the next power of two of its output  Orca (Pow2)
               oracle   its prompt and its output, known in advance          Orca (Oracle)

    batches    iteration   between two steps, requests that have ended leave and waiting ones enter     Orca
               static      a batch is filled once, and returns all its answers when the last one has ended

    a run      [ stored │ reserved for its own future tokens │ never used: estimate too long, or rounded up ]

A prompt is computed in one step, the one in which it starts, together with the decodes of the others. Requests are
served first come, first served: a request that does not fit blocks those after it. No request is preempted, because all
its memory was reserved. Each sample or beam of a prompt has its own run and shares nothing; copying the prompt to it is
assumed to take no time. Requests are validated by the product, and run with its executor, clock and measures.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from quire.core.clock import ManualClock
from quire.core.errors import InvariantError, RequestTooLargeError
from quire.core.request import FinishReason, Request, RequestStatus
from quire.core.setting_checks import require_int, require_one_of
from quire.core.step import StepPlan, StepResult
from quire.core.validate import RequestLimits, max_total_tokens, validate
from quire.memory.ledger import MemoryLedger
from quire.scheduler.commit import StepOutcome
from quire.scheduler.plan_builder import row_start
from quire.simulate.baselines.buddy import BuddyAllocator, run_size
from quire.simulate.cost.base import StepCost
from quire.simulate.cost.linear import LinearCost
from quire.simulate.executor import SimExecutor
from quire.simulate.holders import FIRST_OWNER, FREE
from quire.simulate.replica import VOCAB_SIZE

MAX, POW2, ORACLE = "max", "pow2", "oracle"
ITERATION, STATIC = "iteration", "static"


@dataclass(frozen=True, slots=True)
class ContiguousSetup:
    """The settings of such an engine. A slot holds the keys and values of one token."""

    num_slots: int
    bytes_per_slot: int
    max_model_len: int
    reserves: str = ORACLE
    batches: str = ITERATION
    max_num_seqs: int = 256
    cost: StepCost = field(default_factory=LinearCost)

    def __post_init__(self) -> None:
        require_int("num_slots", self.num_slots, 1, 1 << 40)
        require_int("max_model_len", self.max_model_len, 1, self.num_slots)
        require_int("max_num_seqs", self.max_num_seqs, 1, 1 << 20)
        require_one_of("reserves", self.reserves, (MAX, POW2, ORACLE))
        require_one_of("batches", self.batches, (ITERATION, STATIC))

    def num_reserved(self, num_prompt_tokens: int, num_output_tokens: int) -> int:
        """Return the number of slots to reserve for a sequence.

        >>> for reserves in (MAX, POW2, ORACLE):
        ...     print(ContiguousSetup(4096, 1, 2048, reserves).num_reserved(100, 25), end=" ")
        2048 132 125
        """
        if self.reserves == MAX:
            return self.max_model_len
        output = run_size(num_output_tokens) if self.reserves == POW2 else num_output_tokens
        return min(num_prompt_tokens + output, self.max_model_len)


class ContiguousEngine:
    """A `SimulatedEngine` without paging."""

    def __init__(self, setup: ContiguousSetup) -> None:
        self.clock = ManualClock()
        self.num_preemptions = 0
        self._setup = setup
        self._executor = SimExecutor(VOCAB_SIZE, self.clock, setup.cost)
        self._memory = BuddyAllocator(setup.num_slots)
        longest = setup.max_model_len
        self._limits = RequestLimits(VOCAB_SIZE, longest, longest, setup.max_num_seqs)
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._runs: dict[Request, int] = {}  # running sequences, and in a static batch also ended ones
        self._spare: dict[Request, list[int]] = {}  # runs of samples that have not started yet
        self._ended: list[Request] = []  # ended in a batch that has not
        self._free_rows = list(range(setup.max_num_seqs - 1, -1, -1))
        self._starting: list[Request] = []
        self._released = array("i")
        self._num_added = 0
        self._num_steps = 0
        self._prompt_tokens = 0

    @property
    def num_running(self) -> int:
        """The number of running sequences."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests."""
        return len(self._waiting)

    @property
    def num_disk_tokens(self) -> int:
        """Zero: there is no cache."""
        return 0

    @property
    def num_host_tokens(self) -> int:
        """Zero: there is no cache."""
        return 0

    @property
    def plan(self) -> StepPlan:
        """The plan of the last step."""
        return self._executor.plan

    def add(self, request: Request) -> None:
        """Add a request; raises `InvalidRequestError` if it can never be served. Mutates."""
        validate(request, self._limits)
        request.arrival_s = self.clock.now()
        request.max_total_tokens = max_total_tokens(request, self._limits)
        run = run_size(self._num_reserved(request))
        num_runs = self._setup.num_slots // run
        if request.sampling.num_sequences > num_runs:
            raise RequestTooLargeError(
                "n", request.sampling.num_sequences, f"at most {num_runs}, with runs of {run} slots"
            )
        request.serial = self._num_added
        self._num_added += 1
        self._waiting.append(request)

    def _num_reserved(self, request: Request) -> int:
        num_output_tokens = request.max_total_tokens - request.num_prompt_tokens
        return self._setup.num_reserved(request.num_prompt_tokens, num_output_tokens)

    def step(self) -> StepOutcome | None:
        """Run a step; None: there is nothing to do. Mutates; O(running)."""
        if self._setup.batches == ITERATION or not self._running:
            self._admit()
        if not self._running:
            return None
        decodes = [request for request in self._running if request.num_computed]
        prompts = [request for request in self._running if not request.num_computed]
        self._executor.submit(self._plan(decodes, prompts))
        return self._commit(decodes, prompts, self._executor.collect())

    def _admit(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            num_sequences = request.sampling.num_sequences
            if len(self._free_rows) - sum(map(len, self._spare.values())) < num_sequences:
                return
            taken: list[int] = []
            while len(taken) < num_sequences:
                run = self._memory.allocate(self._num_reserved(request))
                if run is None:
                    for start in taken:
                        self._memory.free(start)
                    return
                taken.append(run)
            self._waiting.popleft()
            self._prompt_tokens += request.num_prompt_tokens
            self._spare[request] = taken[1:]
            self._start(request, taken[0])

    def _start(self, request: Request, run: int) -> None:
        request.row = self._free_rows.pop()
        if request.status is RequestStatus.WAITING:
            request.become(RequestStatus.RUNNING)
        self._runs[request] = run
        self._running.append(request)
        self._starting.append(request)

    def _plan(self, decodes: list[Request], prompts: list[Request]) -> StepPlan:
        ones = array("i", [1]) * len(decodes)
        starting = tuple(map(row_start, self._starting))
        released, self._released, self._starting = self._released, array("i"), []
        self._num_steps += 1
        return StepPlan(
            self._num_steps - 1,
            array("i", [request.row for request in decodes + prompts]),
            array("i", [request.num_computed for request in decodes + prompts]),
            ones + array("i", [len(request.tokens) for request in prompts]),
            ones + array("i", [request.sampling.num_sequences for request in prompts]),
            len(decodes),
            starting,
            released,
        )

    def _commit(self, decodes: list[Request], prompts: list[Request], result: StepResult) -> StepOutcome:
        outcome = StepOutcome(decodes + prompts)
        tokens = iter(result.tokens)
        for request in decodes:
            request.num_computed += 1
            request.tokens.append(next(tokens))
        for request in prompts:
            request.num_computed = len(request.tokens)
            siblings = [request.open_branch(branch) for branch in range(1, request.sampling.num_sequences)]
            for sequence in [request, *siblings]:
                sequence.tokens.append(next(tokens))
            for sibling, run in zip(siblings, self._spare.pop(request), strict=True):
                self._start(sibling, run)
            outcome.opened += siblings
        for request in [*outcome.advanced, *outcome.opened]:
            if len(request.tokens) >= request.max_total_tokens:
                self._end(request)
        if self._setup.batches == ITERATION or not self._running:
            outcome.finished, self._ended = self._ended, []
            for request in outcome.finished:
                self._memory.free(self._runs.pop(request))
        return outcome

    def _end(self, request: Request) -> None:
        self._running.remove(request)
        if request in self._starting:  # a sample of one token, which was in no plan
            self._starting.remove(request)
        else:
            self._released.append(request.row)
        self._free_rows.append(request.row)
        request.row = -1
        request.finish_reason = FinishReason.LENGTH
        request.become(RequestStatus.FINISHED)
        self._ended.append(request)

    def ledger(self) -> MemoryLedger:
        """Return the ledger of the memory, in blocks of one slot. Does not mutate; O(running)."""
        stored = to_come = 0
        for request in self._runs:
            stored += request.num_computed
            if not request.is_finished:
                to_come += request.max_total_tokens - 1 - request.num_computed
        for request, runs in self._spare.items():
            to_come += len(runs) * (request.max_total_tokens - 1)
        used = self._setup.num_slots - self._memory.num_free
        return MemoryLedger(
            block_size=1,
            bytes_per_block=self._setup.bytes_per_slot,
            num_blocks=self._setup.num_slots,
            used_blocks=used,
            cached_blocks=0,
            free_blocks=self._memory.num_free,
            stored_slots=stored,
            reserved_slots=to_come,
            fragmented_slots=used - stored - to_come,
            blocks_saved_by_sharing=0,
            host_blocks=0,
            used_host_blocks=0,
            queried_tokens=self._prompt_tokens,
            hit_tokens=0,
            resumed_queried_tokens=0,
            resumed_hit_tokens=0,
            evictions=0,
            merged_blocks=0,
            copied_blocks=0,
        )

    def holders(self) -> array[int]:
        """Return the holder of each slot; a sequence holds its whole run, used or not. O(slots)."""
        found = array("i", [FREE]) * self._setup.num_slots
        for request, run in self._runs.items():
            for start in (run, *self._spare.get(request, ())):
                size = run_size(self._num_reserved(request))
                found[start : start + size] = array("i", [FIRST_OWNER + request.serial]) * size
        return found

    def survey(self) -> None:
        """Do nothing: there is no cache."""

    def take_cache_news(self) -> None:
        """Do nothing: there is no cache."""

    def check(self) -> None:
        """Raise `InvariantError` unless rows, runs and ledger agree. O(slots)."""
        self._memory.check()
        self.ledger().check()
        held = sum(map(len, self._spare.values()))
        if len(self._free_rows) + len(self._running) != self._setup.max_num_seqs:
            raise InvariantError("a row is lost")
        if not self._running and (self._memory.num_free != self._setup.num_slots or held):
            raise InvariantError("no sequence is running, but memory is held")
