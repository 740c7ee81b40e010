"""Deterministic simulation of the control plane: one seed decides everything that happens.

    Scenario.draw(seed)   the settings, the requests and how much goes wrong
    Simulation.run()      random arrivals, aborts, stops, resets and failures between the steps; then the end of it

The compute plane is a `ShadowExecutor`, so every token is read back through the block tables. After every action all
books are audited; at the end every request must have ended as it should, with the tokens that it would have had alone,
and nothing may be left in memory.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.core.config import MOST_DRAFTS, MemoryConfig, SchedulerConfig
from quire.core.errors import ExecutionError, RequestTooLargeError
from quire.core.images import MIN_IMAGE_TOKENS, Image, names_of
from quire.core.kv_spec import RECURRENT_WINDOW, KVCacheSpec, KVGroup
from quire.core.request import CacheScope, FinishReason, Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan
from quire.core.validate import RequestLimits
from quire.memory.block_pool import BlockPool
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.scheduler import Scheduler
from support.shadow import (
    Guess,
    ShadowExecutor,
    draw,
    expected_report,
    expected_search,
    expected_tokens,
    extend,
    root_digest,
    seen,
)
from support.shadow_disk import ShadowDisk
from support.step_faults import StepFaults

VOCAB_SIZE = 50
MAX_MODEL_LEN = 44
EOS = 7
MAX_IMAGES = 3
PLACEHOLDER = 9


@dataclass(frozen=True)
class Job:
    """What a request is made of, so that it can be made again for another run."""

    request_id: str
    prompt: list[int]
    sampling: SamplingParams
    scope: CacheScope = field(default_factory=CacheScope)
    priority: int = 0
    images: tuple[Image, ...] = ()

    def request(self, arrival_s: float = 0.0) -> Request:
        """Make the request."""
        request = Request(
            self.request_id, self.prompt, self.sampling, scope=self.scope, priority=self.priority, arrival_s=arrival_s
        )
        request.images = self.images
        return request

    @property
    def seen(self) -> list[int]:
        """What the model sees: the tokens of the prompt, and its images."""
        return seen(self.prompt, self.images)


@dataclass(frozen=True)
class Chaos:
    """How likely each kind of trouble is, before each action."""

    abort: float = 0.0
    stop: float = 0.0
    reset: float = 0.0
    fail_row: float = 0.0
    fail_step: float = 0.0
    operate: float = 0.0  # where there is a disk

    @classmethod
    def draw(cls, rng: random.Random) -> Chaos:
        """Half of the runs go undisturbed."""
        if rng.random() < 0.5:
            return cls()
        return cls(*(rng.choice([0.0, 0.0, 0.02, 0.1]) for _ in range(5)))


@dataclass(frozen=True)
class Scenario:
    """All that a run depends on, besides the random numbers that its seed yields."""

    seed: int
    spec: KVCacheSpec
    memory: MemoryConfig
    scheduler: SchedulerConfig
    jobs: list[Job]
    chaos: Chaos = field(default_factory=Chaos)
    arrival_rate: float = 0.5
    draft_accuracy: float | None = None  # None: no drafts
    step_faults: StepFaults = field(default_factory=StepFaults)
    late_share: float = 0.0  # of the samples, postponed
    has_draft_model: bool = False  # whether slots are taken ahead for its guesses

    @classmethod
    def draw(cls, seed: int) -> Scenario:
        """Make the scenario of a seed."""
        rng = random.Random(seed)
        spec = KVCacheSpec(rng.choice([1, 1, 2, 3, 4, 8]), 1, 8, "float32", _draw_groups(rng))
        scheduler = _draw_scheduler_config(rng)
        jobs = _draw_jobs(rng, scheduler.max_num_seqs)
        num_blocks = _draw_num_blocks(rng, spec, jobs)
        memory = MemoryConfig(
            num_blocks=num_blocks,
            num_host_blocks=rng.choice([0, 3, num_blocks // 2 + 1, 100, 100]),
            keeps_on_host=seed % 2 == 1,
            prefix_index=rng.choice(["hash_chain", "radix_tree", "radix_tree", "none"]),
            eviction=rng.choice(["lru", "fifo", "priority"]),
            hash_bits=rng.choice([4, 128]),
            max_cached_blocks_per_tenant=rng.choice([None, None, 0, 2]),
        )
        return cls(
            seed,
            spec,
            memory,
            scheduler,
            jobs,
            Chaos.draw(rng),
            arrival_rate=rng.choice([0.1, 0.5, 1.0]),
            draft_accuracy=rng.choice([None, None, 0.0, 0.7, 1.0]),
            has_draft_model=rng.random() < 0.5,
        )

    def with_chaos(self, chaos: Chaos) -> Scenario:
        """Return the same scenario with other trouble."""
        return replace(self, chaos=chaos)

    def with_late_rows(self, share: float) -> Scenario:
        """Return the same scenario with an executor that postpones samples."""
        return replace(self, late_share=share)

    def with_states(self, rng: random.Random) -> Scenario:
        """Return the same scenario for a model with recurrent layers, which takes no drafts."""
        first, second, third = (KVGroup((layer,), RECURRENT_WINDOW, recurrent=True) for layer in (1, 2, 3))
        full, near = KVGroup((0,)), KVGroup((0,), window=5)
        groups = rng.choice([(full, first), (full, first, second, third), (near, first), (first, second)])
        spec = replace(self.spec, block_size=rng.choice([1, 2, 4, 8, 16]), groups=groups)
        memory = replace(self.memory, num_blocks=_draw_num_blocks(rng, spec, self.jobs))
        return replace(self, spec=spec, memory=memory, draft_accuracy=None)

    def with_disk(self, rng: random.Random) -> Scenario:
        """Return the same scenario with a disk, and with more requests that begin alike."""
        prefix = [rng.randrange(VOCAB_SIZE) for _ in range(32)]
        scopes = [CacheScope("a"), CacheScope("a", salt="salt"), CacheScope("b", persist=False)]
        alike = [
            Job(
                f"alike {index}",
                prefix[: rng.choice([12, 24, 32])] + [rng.randrange(2) for _ in range(rng.choice([0, 1, 5]))],
                SamplingParams(max_tokens=rng.choice([1, 3, 6]), temperature=1.0),
                rng.choice(scopes),
            )
            for index in range(6)
        ]
        jobs = [*self.jobs, *alike]
        rng.shuffle(jobs)
        largest = max(num_blocks_needed(self.spec, job) for job in alike)
        memory = replace(
            self.memory,
            num_blocks=max(self.memory.num_blocks, rng.choice([1, 2, 4]) * largest),
            prefix_index=rng.choice(["hash_chain", "radix_tree"]),
            num_disk_slots=rng.choice([1, 2, 9, 200, 200]),
            disk_write=rng.choice(["on_hit", "always"]),
        )
        return replace(self, memory=memory, jobs=jobs, chaos=replace(self.chaos, operate=rng.choice([0.0, 0.3])))

    def with_images(self, rng: random.Random) -> Scenario:
        """Return the same scenario with images in prompts: the same or other ones behind the same tokens."""
        pictures = [bytes([shade] * 3) for shade in range(3)]
        are_whole, jobs = rng.random() < 0.5, []
        for job in self.jobs:
            images, at = [], rng.choice([0, 0, 2, 5])
            prompt = list(job.prompt)
            while at + MIN_IMAGE_TOKENS <= len(prompt) and len(images) < MAX_IMAGES:
                num_tokens = rng.choice([MIN_IMAGE_TOKENS, MIN_IMAGE_TOKENS, 7])
                if at + num_tokens > len(prompt):
                    break
                images.append(Image.of(at, num_tokens, 1, 1, rng.choice(pictures), is_whole=are_whole))
                prompt[at : at + num_tokens] = [PLACEHOLDER] * num_tokens
                at += num_tokens + rng.choice([0, 1, 4])
            sampling = replace(job.sampling, prompt_logprobs=None) if are_whole else job.sampling
            jobs.append(replace(job, prompt=prompt, images=tuple(images), sampling=sampling))
        spec = replace(self.spec, block_size=rng.choice([4, 4, 8]))
        memory = replace(self.memory, num_blocks=_draw_num_blocks(rng, spec, jobs))
        return replace(self, jobs=jobs, spec=spec, memory=memory)

    def with_step_faults(self, faults: StepFaults) -> Scenario:
        """Return the same scenario with an executor that fails."""
        return replace(self, step_faults=faults)


def _draw_groups(rng: random.Random) -> tuple[KVGroup, ...]:
    window = rng.choice([1, 2, 5, 8, 17])
    return rng.choice(
        [
            (KVGroup((0,)),),
            (KVGroup((0,)),),
            (KVGroup((0,)), KVGroup((1,), window=window)),
            (KVGroup((0,), window=window),),
            (KVGroup((0,), window=window), KVGroup((1,), window=2 * window)),
        ]
    )


def _draw_scheduler_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.choice([3, 4, 8])
    return SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([max_num_seqs, 12, 64]),
        max_model_len=MAX_MODEL_LEN,
        policy=rng.choice(["fcfs", "priority", "fair_share"]),
        priority_ageing_s=rng.choice([0.5, 30.0]),
        headroom=rng.choice([0.0, 0.0, 0.02, 0.3]),
        preemption=rng.choice(["auto", "swap", "swap", "recompute"]),
        recompute_tokens_per_s=rng.choice([100.0, 1e6]),
        swap_bytes_per_s=1e5,
        max_steps_under_way=rng.choice([1, 2, 3]),
    )


def _draw_jobs(rng: random.Random, max_num_seqs: int) -> list[Job]:
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([4, 8, 16]))] for _ in range(2)]
    jobs = []
    sizes, outputs = rng.choice([((0, 1, 2, 7, 16), (1, 2, 3, 8, None)), ((0, 1, 2), (6, 10, 16))])
    fewest, most, beams = rng.choice([(1, 1, 0.0), (1, 3, 0.5), (1, 3, 0.5), (2, 3, 1.0)])
    for index in range(rng.randrange(1, 11)):
        prompt = rng.choice([[], *prefixes]) + [rng.randrange(2) for _ in range(rng.choice(sizes))]
        num_sequences = rng.randint(fewest, most)
        beam_search = num_sequences > 1 and rng.random() < beams
        sampling = SamplingParams(
            n=rng.randrange(1, num_sequences + 1),
            best_of=min(num_sequences, max_num_seqs),
            beam_search=beam_search,
            temperature=0.0 if beam_search else 1.0,
            max_tokens=rng.choice(outputs),
            min_tokens=rng.choice([0, 0, 1, 2, 5]),
            stop_token_ids=rng.choice([(), (), (3,), (1, 40, 41, 42, 43, 44), tuple(range(20, 40))]),
            ignore_eos=rng.random() < 0.3,
            prompt_logprobs=0 if index % 3 == 2 else None,
        )
        if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
            sampling = replace(sampling, min_tokens=sampling.max_tokens)
        scope = CacheScope(tenant=rng.choice("ab"), salt=rng.choice(["", "", "salt"]))
        jobs.append(Job(f"r{index}", prompt or [index], sampling, scope, priority=rng.choice([-1, 0, 0, 2])))
    return jobs


def num_blocks_needed(spec: KVCacheSpec, job: Job, *, output: int | None = None) -> int:
    """How many blocks a request needs to be able to end when nothing else runs.

    The last token is only sampled, never stored. Beams move together, so all of them must fit; they share the full
    blocks of their prompt, except in window groups, whose windows may have moved on. Samples need not run side by side.
    """
    stored = len(job.prompt) + (output or job.sampling.max_tokens or 1) - 1
    longest_image = max((image.num_tokens for image in job.images if image.is_whole), default=1)
    alone = spec.num_blocks_for(stored, longest_chunk=longest_image)
    if not job.sampling.beam_search:
        return alone
    total = 0
    for group in spec.groups:
        own = replace(spec, groups=(group,)).num_blocks_for(stored)
        shared = len(job.prompt) // spec.block_size if group.window is None else 0
        total += shared + job.sampling.num_sequences * (own - shared)
    return max(total, alone)


def _draw_num_blocks(rng: random.Random, spec: KVCacheSpec, jobs: list[Job]) -> int:
    """Often just what the largest needs, or one more; sometimes too few for some, sometimes plenty."""
    needed = [num_blocks_needed(spec, job) for job in jobs]
    largest = max(needed)
    return max(
        1, rng.choice([largest, largest, largest + 1, 2 * largest, sorted(needed)[len(needed) // 2], sum(needed)])
    )


def expected_ends(job: Job, max_total_tokens: int) -> tuple[list[list[int]], bool]:
    """The output tokens of each sequence of a request that nobody ends before its time, by branch.

    And whether a search is over before its beams are as long as they may become.
    """
    sampling, salt = job.sampling, job.scope.salt
    most = max_total_tokens - len(job.prompt)
    if sampling.beam_search and sampling.num_sequences > 1:
        return expected_search(job.seen, sampling.num_sequences, most, VOCAB_SIZE, salt=salt, can_end=True)
    stops = set() if sampling.beam_search else set(sampling.stop_token_ids)
    if not sampling.ignore_eos and not sampling.beam_search:
        stops.add(EOS)
    ends = []
    for branch in range(sampling.num_sequences):
        tokens = expected_tokens(job.seen, most, VOCAB_SIZE, salt=salt, branch=branch)
        earliest = max(1, sampling.min_tokens)
        end = next((at for at, token in enumerate(tokens, 1) if at >= earliest and token in stops), most)
        ends.append(tokens[:end])
    return ends, False


def make_guesser(accuracy: float, seed: int, salt_of: Callable[[str], str]) -> Guess:
    """Return what guesses each token right with that probability."""
    rng = random.Random(seed)

    def guess(request_id: str, known: Sequence[int], most: int) -> list[int]:
        digest = extend(root_digest(salt_of(request_id)), *known)
        tokens = []
        for _ in range(rng.randrange(most + 1)):
            token = draw(digest, VOCAB_SIZE)
            if rng.random() >= accuracy:
                token = (token + 1) % VOCAB_SIZE
            tokens.append(token)
            digest = extend(digest, token)
        return tokens

    return guess


class FailingAllocations:
    """Makes pools whose allocations fail when told to, though there are blocks. `fails` is asked once for each."""

    def __init__(self, fails: Callable[[int], bool]) -> None:
        self._fails = fails
        self.num_allocations = 0
        self.num_failures = 0

    def make_pool(self, *arguments: Any, **options: Any) -> BlockPool:
        """Make the pool."""
        faults = self

        class FailingPool(BlockPool):
            def allocate(self, num_blocks: int) -> list[int] | None:
                return None if num_blocks and faults.strikes() else super().allocate(num_blocks)

        return FailingPool(*arguments, **options)

    def strikes(self) -> bool:
        """Whether this allocation fails."""
        self.num_allocations += 1
        failed = self._fails(self.num_allocations - 1)
        self.num_failures += failed
        return failed


class Simulation:
    """One run of a scenario, with allocations that fail if so wished."""

    def __init__(
        self, scenario: Scenario, faults: FailingAllocations | None = None, disk: ShadowDisk | None = None
    ) -> None:
        self.scenario = scenario
        self._faults = faults
        self._disk = disk
        self._rng = random.Random(scenario.seed + 1)
        self._jobs = {job.request_id: job for job in scenario.jobs}
        self._pending = list(reversed(scenario.jobs))
        self._longest_image = max(job.request().longest_image for job in scenario.jobs)
        make_pool = faults.make_pool if faults else BlockPool
        kept = () if disk is None else disk.restart()
        self.memory = KVCacheManager(scenario.spec, scenario.memory, make_pool=make_pool, kept=kept)
        num_blocks = scenario.memory.num_blocks
        limits = RequestLimits(
            VOCAB_SIZE,
            MAX_MODEL_LEN,
            max_sequence_tokens(num_blocks, scenario.spec),
            scenario.scheduler.max_num_seqs,
            (EOS,),
            max_images=MAX_IMAGES,
        )
        accuracy = scenario.draft_accuracy
        config = scenario.scheduler if accuracy is None else replace(scenario.scheduler, max_drafts=MOST_DRAFTS)
        if accuracy is not None and scenario.has_draft_model and not self.memory.has_windows:
            config = replace(config, max_depth=MOST_DRAFTS)
        self.scheduler = Scheduler(config, self.memory, limits)
        self.executor = ShadowExecutor(scenario.spec, VOCAB_SIZE, salt_of=self._salt_of, ends_searches=True, disk=disk)
        if accuracy is not None:
            self.executor.guess = make_guesser(accuracy, scenario.seed, self._salt_of)
        self.executor.fault = scenario.step_faults.fault()
        late = random.Random(scenario.seed + 2)
        self.executor.is_late = lambda: late.random() < scenario.late_share
        self.requests: list[Request] = []
        self.refused: list[str] = []
        self._stopped: set[tuple[str, int]] = set()
        self.num_actions = 0
        self.seen: Counter[str] = Counter()  # what the run went through, so that a test can tell that it does happen
        self.plans = self.executor.plans
        self._now_s = 0.0

    def _salt_of(self, request_id: str) -> str:
        return self._jobs[request_id].scope.salt

    def run(self) -> Counter[str]:
        """Run to the end and check everything; return what the run went through."""
        try:
            most = 500 + 60 * (9 if self.scenario.step_faults.are_there else 1) * sum(
                job.sampling.num_sequences * (len(job.prompt) + MAX_MODEL_LEN) for job in self._jobs.values()
            )
            most = int(most / (1 - self.scenario.late_share))
            while self._pending or self.scheduler.requests or self.scheduler.num_steps_under_way:
                self.num_actions += 1
                if self.num_actions > most:
                    raise AssertionError(f"no end after {most} actions; running {self.scheduler.running}")
                self._arrive()
                self._disturb()
                self._advance()
                self.scheduler.check()
            self._check_nothing_left()
            for request in self.requests:
                self._check_outcome(request)
        except BaseException as error:
            error.add_note(f"{self.scenario}")
            raise
        return self.seen

    # ---- what happens -----------------------------------------------------------------------------------------

    def _arrive(self) -> None:
        while self._pending and self._rng.random() < self.scenario.arrival_rate:
            self._now_s += self._rng.random()
            job = self._pending.pop()
            request = job.request(self._now_s)
            fits = num_blocks_needed(self.scenario.spec, job) <= self.scenario.memory.num_blocks
            fits = fits and len(job.prompt) + (job.sampling.max_tokens or 1) <= MAX_MODEL_LEN
            try:
                self.scheduler.add(request)
            except RequestTooLargeError:
                assert not fits, f"{job} was refused"
                self.refused.append(job.request_id)
            else:
                assert fits, f"{job} can never fit and was not refused"
                self.requests.append(request)

    def _disturb(self) -> None:
        chaos, rng = self.scenario.chaos, self._rng
        alive = list(self.scheduler.requests)
        if alive and rng.random() < chaos.abort:
            self.scheduler.abort(rng.choice(alive))
        alive = [name for name in self.scheduler.requests if not self._jobs[name].sampling.beam_search]
        if alive and rng.random() < chaos.stop:
            name, branch = rng.choice(alive), rng.randrange(3)
            self._stopped.add((name, branch))
            self.scheduler.stop(name, branch)
        if rng.random() < chaos.reset:
            self.memory.reset()
        running = self.scheduler.running
        if running and rng.random() < chaos.fail_row:
            self.executor.fail_rows = {rng.choice(running).row}
        if self.scheduler.num_steps_under_way and rng.random() < chaos.fail_step:
            self.executor.fail_next_collect = True
        if self._disk is not None and rng.random() < chaos.operate:
            self._operate(self._disk)

    def _operate(self, disk: ShadowDisk) -> None:
        """An operator has a prompt kept, or blocks taken in that were on the disk once."""
        jobs, rng = self.memory.jobs, self._rng
        if rng.random() < 0.5:
            job = rng.choice(self.scenario.jobs)
            jobs.keep(
                "kept",
                names_of(array("i", job.prompt), job.images, self.memory.spec.block_size),
                job.scope,
                wants_slots=True,
            )
        else:
            name = disk.pack()[0] if not disk.bundles or rng.random() < 0.5 else rng.choice(list(disk.bundles))
            jobs.take(name, name, disk.packed(name))
            self.seen["taken in"] += jobs.figures()[name].num_pending
            jobs.end(name)

    def _advance(self) -> None:
        under_way = self.scheduler.num_steps_under_way
        if under_way < self.scenario.scheduler.max_steps_under_way and (not under_way or self._rng.random() < 0.6):
            num_failures = self._faults.num_failures if self._faults else 0
            plan = self.scheduler.schedule()
            if plan is not None:
                assert plan.num_tokens <= self.scenario.scheduler.max_num_batched_tokens + self._longest_image
                self._see(plan)
                self.executor.submit(plan)
                return
            if not under_way:
                has_reason = self._faults is not None and self._faults.num_failures > num_failures
                assert has_reason or not self.scheduler.requests, f"no plan for {list(self.scheduler.requests)}"
                return
        try:
            result = self.executor.collect()
        except ExecutionError as error:
            ended = self.scheduler.lose_steps(error)
            assert len({request.request_id for request in ended}) <= 1
            assert all(request.finish_reason is FinishReason.ERROR for request in ended)
        else:
            self.scheduler.update(result)

    def _see(self, plan: StepPlan) -> None:
        for name in ("moves_out", "moves_in", "copies", "drafts", "depths"):
            self.seen[name] += len(getattr(plan, name))
        for request in self.scheduler.running:
            if request.num_preemptions and request.group is not None and request.group.opened:
                self.seen["beams resumed" if request.sampling.beam_search else "samples resumed"] += 1

    # ---- what must hold at the end ------------------------------------------------------------------------------

    def _check_nothing_left(self) -> None:
        memory, scheduler = self.memory, self.scheduler
        assert not scheduler.running
        assert not scheduler.num_waiting
        assert not memory.memories
        assert not memory.pool.num_in_use
        assert memory.host.num_in_use == len(memory.host.used_by_plan), "only copies of the next plan are left"
        ledger = memory.ledger()
        self.seen["hits"] += ledger.hit_tokens
        self.seen["evictions"] += ledger.evictions
        self.seen += memory.disk.counts
        self.seen["from disk"] += sum(request.num_disk_tokens for request in self.requests)
        self.seen["merged blocks"] += ledger.merged_blocks
        self.seen["preemptions"] += scheduler.num_preemptions
        self.seen["postponed"] += self.executor.num_postponed
        self.seen["refused"] += len(self.refused)
        isolation = scheduler.isolation
        assert not isolation.is_under_way
        self.seen["failed steps"] += isolation.num_failed_steps
        self.seen["memory failures"] += isolation.num_memory_failures
        self.seen["culprits"] += isolation.num_culprits
        self.seen["smaller steps"] += isolation.max_step_tokens < self.scenario.scheduler.max_num_batched_tokens
        memory.reset()
        memory.check()
        assert memory.pool.num_free == memory.pool.num_blocks
        assert not len(memory.index)

    def _may_end(self, job: Job) -> bool:
        """Whether a request may end with an error."""
        chaos, sampling = self.scenario.chaos, job.sampling
        num_beams = sampling.num_sequences if sampling.beam_search else 1
        has_luck = not chaos.fail_row and not chaos.fail_step
        return not has_luck or self.scenario.step_faults.may_end(job.request_id, num_beams)

    def _check_outcome(self, request: Request) -> None:
        job = self._jobs[request.request_id]
        faults = self.scenario.step_faults
        members = request.group.members if request.group else [request]
        ends, is_over = expected_ends(job, request.max_total_tokens)
        is_search = job.sampling.beam_search and job.sampling.num_sequences > 1
        report = [] if job.sampling.prompt_logprobs is None else expected_report(job.prompt, job.scope.salt, job.images)
        for member in members:
            assert member.tokens[: len(job.prompt)].tolist() == job.prompt
            output, end = member.output_token_ids, ends[member.branch]
            assert member.prompt_logprobs == (report if output else report[: len(member.prompt_logprobs)])
            assert member.finish_reason is not None
            self.seen[member.finish_reason.value] += 1
            reason, name = member.finish_reason, (job.request_id, member.branch)
            assert reason is not FinishReason.ERROR or self._may_end(job), f"{name} is at no fault: {member.error}"
            assert len(member.tokens) <= (faults.most_known(job.request_id, len(job.prompt)) or MAX_MODEL_LEN)
            if reason in (FinishReason.ABORT, FinishReason.ERROR) or name in self._stopped:
                if is_search:
                    count, salt = len(output), job.scope.salt
                    beams, _ = expected_search(job.seen, len(ends), count, VOCAB_SIZE, salt=salt)
                    assert output == beams[member.branch]
                else:
                    assert output == end[: len(output)]
                assert (reason is FinishReason.ERROR) == bool(member.error)
            else:
                length = request.max_total_tokens - len(job.prompt)
                stopped = is_over and end[-1] in _stop_tokens(job) if is_search else len(end) and _stops(job, end)
                self.seen["searches over"] += is_over
                assert reason is (FinishReason.STOP if stopped else FinishReason.LENGTH), (reason, end, length)
                assert output == end, f"{name}: {output} instead of {end}"
        if all(member.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for member in members):
            opened = not any(branch == 0 and name == job.request_id for name, branch in self._stopped)
            assert len(members) == job.sampling.num_sequences or not opened


def _stop_tokens(job: Job) -> set[int]:
    return set(job.sampling.stop_token_ids) | (set() if job.sampling.ignore_eos else {EOS})


def _stops(job: Job, output: list[int]) -> bool:
    return not job.sampling.beam_search and len(output) >= job.sampling.min_tokens and output[-1] in _stop_tokens(job)
