"""The control plane over a `ShadowExecutor`, driven step by step: for tests that name what they look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.core.config import MOST_DRAFTS, MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError
from quire.core.kv_spec import KVCacheSpec, KVGroup
from quire.core.request import CacheScope, Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan
from quire.core.validate import RequestLimits
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.commit import StepOutcome
from quire.scheduler.scheduler import Scheduler
from support.shadow import Guess, ShadowExecutor, expected_search, expected_tokens

VOCAB_SIZE = 50
MEMORY_SETTINGS = set(MemoryConfig.__dataclass_fields__)


class Control:
    """A scheduler, its memory and an executor. Settings go to whichever config has them."""

    def __init__(
        self,
        *,
        block_size: int = 4,
        windows: Sequence[int | None] = (None,),
        eos: Iterable[int] = (),
        guess: Guess | None = None,
        vocab_size: int = VOCAB_SIZE,
        check_every: int = 1,
        **settings: Any,
    ) -> None:
        groups = tuple(KVGroup((layer,), window) for layer, window in enumerate(windows))
        self.spec = KVCacheSpec(block_size, 1, 8, "float32", groups)
        in_memory = {name: value for name, value in settings.items() if name in MEMORY_SETTINGS}
        of_scheduler = {name: value for name, value in settings.items() if name not in MEMORY_SETTINGS}
        self.memory = KVCacheManager(self.spec, MemoryConfig(**{"num_blocks": 64} | in_memory))
        defaults = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 128, "headroom": 0.0}
        if guess is not None:
            defaults["max_drafts"] = MOST_DRAFTS
        config = SchedulerConfig(**defaults | of_scheduler)
        longest = max_sequence_tokens(self.memory.pool.num_blocks, self.spec)
        limits = RequestLimits(vocab_size, config.max_model_len, longest, config.max_num_seqs, tuple(eos))
        self.scheduler = Scheduler(config, self.memory, limits)
        self.executor = ShadowExecutor(self.spec, vocab_size, salt_of=self._salt_of)
        if guess is not None:
            self.executor.guess = guess
        self.requests: dict[str, Request] = {}
        self._salts: dict[str, str] = {}
        self.plans: list[StepPlan] = []
        self._vocab_size = vocab_size
        self._check_every = check_every
        self._num_events = 0

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        scope: CacheScope | None = None,
        priority: int = 0,
        arrival_s: float = 0.0,
        **sampling: Any,
    ) -> Request:
        """Add a request; what is left over says how it is sampled."""
        if sampling.get("beam_search"):
            sampling.setdefault("temperature", 0.0)
        request = Request(
            request_id,
            prompt,
            SamplingParams(**sampling),
            scope=scope or CacheScope(),
            priority=priority,
            arrival_s=arrival_s,
        )
        self.scheduler.add(request)
        self.requests[request_id] = request
        self._salts[request_id] = request.scope.salt
        return request

    def _salt_of(self, request_id: str) -> str:
        return self._salts[request_id]

    # ---- steps ------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plan a step and hand it out."""
        plan = self.scheduler.schedule()
        self._check()
        if plan is not None:
            self.plans.append(plan)
            self.executor.submit(plan)
        return plan

    def collect(self) -> StepOutcome:
        """Commit the oldest step under way, or find out whose fault it is that it is lost."""
        try:
            result = self.executor.collect()
        except ExecutionError as error:
            ended = self.scheduler.lose_steps(error)
            outcome = StepOutcome(ended, finished=ended)
        else:
            outcome = self.scheduler.update(result)
        self._check()
        return outcome

    def _check(self) -> None:
        self._num_events += 1
        if self._num_events % self._check_every == 0:
            self.scheduler.check()

    def step(self) -> StepPlan | None:
        """Plan as many steps as may be under way, and collect one."""
        plan = None
        while self.scheduler.num_steps_under_way < self.scheduler.config.max_steps_under_way:
            planned = self.plan()
            if planned is None:
                break
            plan = planned
        if self.scheduler.num_steps_under_way:
            self.collect()
        return plan

    def run(self, most_steps: int = 5000) -> None:
        """Step until every request has ended; nothing may be left in memory then."""
        for _ in range(most_steps):
            if not self.scheduler.requests and not self.scheduler.num_steps_under_way:
                break
            self.step()
        assert not self.scheduler.requests, f"{list(self.scheduler.requests)} did not end in {most_steps} steps"
        self.check_nothing_held()

    def check_nothing_held(self) -> None:
        """Nobody holds a block, on the device or on the host."""
        assert not self.memory.memories
        assert not self.memory.pool.num_in_use
        assert not self.memory.host.num_in_use

    # ---- what came out ------------------------------------------------------------------------------------------

    def members(self, request_id: str) -> list[Request]:
        """The sequences of a request, by branch."""
        request = self.requests[request_id]
        return request.group.members if request.group else [request]

    def outputs(self, request_id: str) -> list[list[int]]:
        """The tokens of each sequence of a request."""
        return [member.output_token_ids for member in self.members(request_id)]

    def expected(self, request_id: str) -> list[list[int]]:
        """The tokens that each sequence must have, given how many it has."""
        request, members = self.requests[request_id], self.members(request_id)
        prompt, salt = request.tokens[: request.num_prompt_tokens].tolist(), request.scope.salt
        counts = [member.num_output_tokens for member in members]
        if request.sampling.beam_search and len(members) > 1:
            assert len(set(counts)) == 1
            return expected_search(prompt, len(members), counts[0], self._vocab_size, salt=salt)[0]
        return [
            expected_tokens(prompt, count, self._vocab_size, salt=salt, branch=member.branch)
            for member, count in zip(members, counts, strict=True)
        ]

    def check_outputs(self) -> None:
        """Every sequence has the tokens that it would have had alone, and if `max_tokens` is given, so many."""
        for request_id, request in self.requests.items():
            outputs = self.outputs(request_id)
            assert outputs == self.expected(request_id)
            assert len(outputs) == request.sampling.num_sequences
            if request.sampling.max_tokens is not None and not request.sampling.stop_token_ids:
                assert {len(output) for output in outputs} == {request.sampling.max_tokens}
