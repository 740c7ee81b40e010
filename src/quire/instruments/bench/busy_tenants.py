"""Tenants with endless requests, on the real scheduler over a simulated model: counts the tokens computed for each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.core.clock import ManualClock
from quire.core.config import MOST_DRAFTS, MemoryConfig, SchedulerConfig
from quire.core.errors import InvariantError
from quire.core.kv_spec import KVCacheSpec
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan
from quire.core.validate import RequestLimits
from quire.engine.commands import Abort, Fail, Stop
from quire.engine.core import EngineCore
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.scheduler import Scheduler
from quire.simulate.executor import SimExecutor

VOCAB_SIZE = 1000
ENDS = ("length", "stop string", "stop token", "abort", "failure", "samples", "beams")


@dataclass(frozen=True)
class Habit:
    """The requests of a tenant: tokens of prompt and answer, and the way in which the answer ends."""

    num_prompt_tokens: int
    num_output_tokens: int
    end: str = "length"

    @property
    def most_tokens(self) -> int:
        """The most tokens that one request can cost, unless some are recomputed."""
        return self.num_sequences * (self.num_prompt_tokens + self.num_output_tokens)

    @property
    def num_sequences(self) -> int:
        """The number of sequences per request."""
        return 2 if self.end in ("samples", "beams") else 1

    def sampling(self) -> SamplingParams:
        """Return the sampling parameters. Requests that end early request more tokens than they get."""
        if self.end in ("stop string", "abort", "failure"):
            return SamplingParams(max_tokens=2 * self.num_output_tokens + 40, ignore_eos=True)
        if self.end == "stop token":  # each token is one of 1,000, so about every tenth ends the text
            return SamplingParams(max_tokens=self.num_output_tokens, stop_token_ids=tuple(range(100)))
        is_beam_search = self.end == "beams"
        temperature = 0.0 if is_beam_search else 1.0
        return SamplingParams(
            n=self.num_sequences,
            beam_search=is_beam_search,
            temperature=temperature,
            max_tokens=self.num_output_tokens,
            ignore_eos=True,
        )


class CountingExecutor(SimExecutor):
    """Counts the tokens that plans compute, by request id up to the first blank: the tenant."""

    def __init__(self, acceptance: float | None) -> None:
        super().__init__(VOCAB_SIZE, ManualClock(), acceptance=acceptance)
        self._tenants: dict[int, str] = {}  # by row
        self.computed = Counter[str]()

    def submit(self, plan: StepPlan) -> None:
        """Count the tokens, then simulate the step."""
        self._tenants |= {start.row: start.request_id.split()[0] for start in plan.row_starts}
        for row, count in zip(plan.rows, plan.counts, strict=True):
            self.computed[self._tenants[row]] += count
        super().submit(plan)


class BusyTenants:
    """Each tenant always has `at_once` requests in the engine. `acceptance` of guesses; None: no guesses."""

    def __init__(
        self,
        habits: Sequence[Habit],
        config: SchedulerConfig,
        *,
        block_size: int,
        at_once: int,
        memory: MemoryConfig | None = None,
        acceptance: float | None = None,
    ) -> None:
        spec = KVCacheSpec.from_layers([None], block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32")
        manager = KVCacheManager(spec, memory or MemoryConfig())
        longest = max_sequence_tokens(manager.pool.num_blocks, spec)
        limits = RequestLimits(VOCAB_SIZE, config.max_model_len, longest, config.max_num_seqs)
        config = config if acceptance is None else replace(config, max_drafts=MOST_DRAFTS)
        scheduler = Scheduler(config, manager, limits)
        self.executor = CountingExecutor(acceptance)
        self.engine = EngineCore(scheduler, self.executor, ManualClock())
        self.habits = {chr(ord("a") + index): habit for index, habit in enumerate(habits)}
        self.ended = Counter[str]()
        self._at_once = at_once
        self._alive: dict[str, dict[str, Request]] = {tenant: {} for tenant in self.habits}
        self._numbers = itertools.count()

    def run(self, num_tokens: int) -> Counter[str]:
        """Step until this many tokens are computed for all tenants in total; return the count of each. Mutates."""
        while self.executor.computed.total() < num_tokens:
            for tenant in self.habits:
                self._ask(tenant)
            outcome = self.engine.step()
            if outcome is None:
                raise InvariantError("the engine ran out of requests")
            for request in outcome.finished:
                self._note_ended(request)
            self._end()
        return self.executor.computed

    def _ask(self, tenant: str) -> None:
        habit, alive = self.habits[tenant], self._alive[tenant]
        while len(alive) < self._at_once:
            number = next(self._numbers)
            prompt = [(7 * number + 13 * index) % VOCAB_SIZE for index in range(habit.num_prompt_tokens)]
            request = Request(f"{tenant} {number}", prompt, habit.sampling(), scope=CacheScope(tenant, salt=tenant))
            alive[request.request_id] = request
            self.engine.add_request(request)

    def _end(self) -> None:
        """End the requests that should end by a stop string, an abort or a failure."""
        for tenant, habit in self.habits.items():
            if habit.end not in ("stop string", "abort", "failure"):
                continue
            for request in list(self._alive[tenant].values()):
                if request.num_output_tokens < habit.num_output_tokens:
                    continue
                if habit.end == "stop string":
                    self.engine.send(Stop(request.request_id))
                elif habit.end == "abort":
                    self.engine.send(Abort(request.request_id))
                else:
                    self.engine.send(Fail(request.request_id, "told to fail"))
                self._note_ended(request)

    def _note_ended(self, request: Request) -> None:
        tenant = request.scope.tenant
        if request.request_id in self._alive[tenant] and request.request_id not in self.engine.scheduler.requests:
            del self._alive[tenant][request.request_id]
            self.ended[tenant] += 1


def worst_miss(computed: Counter[str]) -> float:
    """Return the largest relative distance of a tenant's share from an even share."""
    even = computed.total() / len(computed)
    return max(abs(tokens - even) / even for tenant, tokens in computed.items())
