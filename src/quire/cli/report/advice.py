"""Suggestions: rules that look for a problem in a run, and trials that measure another setting.

    RecordedRun ──► rule ──► Trial: a setting, the evidence for it, the figure that it should improve
                               │ simulate the requests of the log on an engine with that setting,
                               ▼ with step times fitted to the log
                             Finding: the figure before and after, other changes, and a verdict

A rule never advises. It proposes a trial, and the trial decides: both figures of a finding are simulated, with the
product's scheduler and memory, and differ in one setting only. So an error of the simulation (step times are fitted)
affects both figures alike. Trials without a gain are reported too, because they answer a question. But if the figures
depend on more than the log, or leave something out, the trial has a caveat, and is reported only if it is a gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from quire.cli.report.recorded import RecordedRun
from quire.cli.report.units import show_bytes, show_count, show_seconds, show_share
from quire.memory.sequence import MissReason
from quire.simulate.cost.base import StepCost
from quire.simulate.cost.moving import MovingCost
from quire.simulate.replica import EngineSetup

MIB: Final = 1 << 20
NATIVE_BLOCK_SIZES: Final = (16, 32, 64, 128)
LEAST_GAIN: Final = 0.05
"""A figure that improves by at least this share is a gain."""
MOST_HARM: Final = 0.10
"""Another figure that gets worse by at least this share is a price."""
ROOMY: Final = 0.5
"""A pool that never used more than this share of its blocks may be too large."""
OFTEN: Final = 0.02
"""An event in fewer than this share of the steps is not worth a trial."""


GAIN, GAIN_AT_A_PRICE, NO_GAIN = "a gain", "a gain, at a price", "no gain"
"""Verdicts, in the order of the report."""
INT8_CAVEAT: Final = (
    "int8 changes outputs slightly (a mean KL of 0.0009 nat on SmolLM2-135M: benchmarks/RESULTS.md, Quality); "
    "assumes that steps take as long as before"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure that a setting can improve."""

    name: str
    of: Callable[[RecordedRun], float]
    show: Callable[[float], str]
    more_is_better: bool = False

    def gain(self, before: RecordedRun, after: RecordedRun) -> float:
        """Return the relative improvement of the figure; below 0: it got worse."""
        old, new = self.of(before), self.of(after)
        if old == new:
            return 0.0
        change = (new - old) / old if old else float("inf")
        return change if self.more_is_better else -change


WAIT: Final = Figure("waiting p95", lambda run: run.wait_s.percentile(95.0), show_seconds)
WORST_WAIT: Final = Figure(
    "waiting p95 of the worst tenant",
    lambda run: max(tenant.wait_s.percentile(95.0) for tenant in run.tenants.values()),
    show_seconds,
)
FIRST_TOKEN: Final = Figure("first token p95", lambda run: run.latencies.ttft_s.percentile(95.0), show_seconds)
BETWEEN: Final = Figure("between tokens p95", lambda run: run.latencies.itl_s.percentile(95.0), show_seconds)
LATENCY: Final = Figure("latency p95", lambda run: run.latencies.latency_s.percentile(95.0), show_seconds)
HITS: Final = Figure("found in the cache", lambda run: run.scheduler.memory.ledger().hit_rate, show_share, True)
PREEMPTIONS: Final = Figure("preemptions", lambda run: run.scheduler.num_preemptions, show_count)
RECOMPUTED: Final = Figure("tokens computed again", lambda run: run.recomputed_tokens, show_count)
WASTE: Final = Figure("waste", lambda run: run.waste, show_share)
SERVED: Final = Figure("requests served", lambda run: run.num_requests, show_count, True)
POOL: Final = Figure(
    "KV memory",
    lambda run: run.scheduler.memory.config.num_blocks * run.scheduler.memory.spec.bytes_per_block,
    show_bytes,
)
FIGURES: Final = (SERVED, FIRST_TOKEN, BETWEEN, LATENCY, HITS, PREEMPTIONS, RECOMPUTED, WASTE)
"""The figures that are compared in every trial."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that is worth trying, and why. `caveat`: what its figures leave out."""

    setting: str
    evidence: str
    goal: Figure
    setup: EngineSetup
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a trial. `goal`, `others` (improved) and `prices` (worse) are texts like `preemptions 41 → 0`.

    `before` and `after` are the goal as numbers: times in seconds, shares from 0 to 1. `caveat`: what they leave out.
    """

    setting: str
    evidence: str
    verdict: str
    before: float
    after: float
    goal: str
    others: tuple[str, ...]
    prices: tuple[str, ...]
    caveat: str

    @property
    def is_told(self) -> bool:
        """Whether the report includes the finding: always, unless it has a caveat and no gain."""
        return self.verdict != NO_GAIN or not self.caveat


Rule = Callable[[RecordedRun, EngineSetup], Iterator[Trial]]


def more_memory(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """If requests are preempted, wait for blocks or lose cached blocks, try a larger pool."""
    for goal, evidence in _shortage(run):
        for factor in (1.5, 2.0):
            yield _with_blocks(setup, int(setup.memory.num_blocks * factor), evidence, goal)


def int8_numbers(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """In the same cases, try a narrower KV type: more blocks in the same bytes."""
    spec, narrow = setup.spec, replace(setup.spec, dtype="int8")
    if spec.has_recurrent_layers and spec.block_size == spec.usual_block_size:  # chosen by the engine, so it will again
        narrow = narrow.with_block_size(narrow.usual_block_size)
    if narrow.bytes_per_block * spec.block_size < spec.bytes_per_block * narrow.block_size:
        for goal, evidence in _shortage(run):
            blocks, host_blocks = (
                count * spec.bytes_per_block // narrow.bytes_per_block
                for count in (setup.memory.num_blocks, setup.memory.num_host_blocks)
            )
            memory = replace(setup.memory, num_blocks=blocks, num_host_blocks=host_blocks)
            sizes = [
                f" of {each.block_size} tokens" * (narrow.block_size != spec.block_size) for each in (narrow, spec)
            ]
            room = f"{evidence}; {blocks:,} blocks{sizes[0]} would fit, not {setup.memory.num_blocks:,}{sizes[1]}"
            yield Trial("--kv-dtype int8", room, goal, replace(setup, spec=narrow, memory=memory), INT8_CAVEAT)


def swap_space(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """If preempted requests lost computed blocks, try swap space for the most blocks that were lost at once."""
    if not run.most_lost_blocks:
        return
    size, speed = setup.spec.bytes_per_block, setup.scheduler.swap_bytes_per_s
    cost: StepCost = MovingCost(setup.cost, size / speed)
    caveat = f"assumes that blocks move at {show_bytes(speed)} per second, as --preemption auto does"
    if run.num_swapped:  # then the log's step times include swapping
        cost, caveat = setup.cost, "assumes that blocks move as fast as the blocks that were swapped"
    num_blocks = setup.memory.num_host_blocks + run.most_lost_blocks
    setting, scheduler = f"--swap-space {_as_option(num_blocks * size)}", setup.scheduler
    if scheduler.preemption == "recompute":
        setting, scheduler = f"{setting} --preemption auto", replace(scheduler, preemption="auto")
    tried = EngineSetup(setup.spec, replace(setup.memory, num_host_blocks=num_blocks), scheduler, cost)
    count = run.scheduler.num_preemptions - run.num_swapped
    evidence = f"{count:,} preemptions by recompute, which dropped up to {run.most_lost_blocks:,} blocks at once"
    yield Trial(setting, evidence, LATENCY, tried, caveat)


def less_memory(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """If the pool was never half in use, try a smaller one."""
    num_blocks, most = setup.memory.num_blocks, run.most_used_blocks
    if most < ROOMY * num_blocks and not run.scheduler.num_preemptions:
        evidence = f"never more than {most:,} of {num_blocks:,} blocks were in use"
        yield _with_blocks(setup, max(num_blocks // 2, most), evidence, POOL)


def block_size(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Smaller blocks waste less and hit at a finer grain; larger blocks need less bookkeeping. Try both."""
    size = setup.spec.block_size
    for other in (size // 2, size * 2):
        if other in NATIVE_BLOCK_SIZES:
            num_blocks = setup.memory.num_blocks * size // other
            tried = replace(
                setup,
                spec=replace(setup.spec, block_size=other),
                memory=replace(setup.memory, num_blocks=max(num_blocks, 1)),
            )
            evidence = f"{show_share(run.waste)} of the slots in use are empty"
            yield Trial(f"--block-size {other}", evidence, WASTE, tried)


def prefix_cache(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Measure the benefit of the prefix cache, whether it is on or off."""
    if setup.memory.prefix_index == "none":
        tried = replace(setup, memory=replace(setup.memory, prefix_index="hash_chain"))
        yield Trial("--enable-prefix-caching", "prompts are not cached", FIRST_TOKEN, tried)
    else:
        tried = replace(setup, memory=replace(setup.memory, prefix_index="none"))
        evidence = f"{show_share(HITS.of(run))} of the prompt tokens came from the cache"
        yield Trial("--no-enable-prefix-caching", evidence, FIRST_TOKEN, tried)


def eviction(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """If requests missed evicted blocks, try another eviction policy."""
    num_missed = run.missed_requests[MissReason.EVICTED]
    if num_missed:
        evidence = f"{num_missed:,} requests missed blocks that had been evicted"
        other = "fifo" if setup.memory.eviction == "lru" else "lru"
        tried = replace(setup, memory=replace(setup.memory, eviction=other))
        yield Trial(f"--eviction {other}", evidence, HITS, tried)


def fair_share(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """If some tenants wait much longer than others, try fair sharing."""
    waits = sorted(tenant.wait_s.percentile(95.0) for tenant in run.tenants.values())
    if len(waits) > 1 and setup.scheduler.policy != "fair_share" and waits[-1] > 2 * waits[0]:
        evidence = f"tenants wait from {show_seconds(waits[0])} to {show_seconds(waits[-1])} at p95"
        tried = replace(setup, scheduler=replace(setup.scheduler, policy="fair_share"))
        yield Trial("--policy fair_share", evidence, WORST_WAIT, tried)


def more_rows(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """If requests wait for a row, try more rows."""
    most = setup.scheduler.max_num_seqs
    if run.num_steps_without_rows > OFTEN * run.num_plans:
        tokens = max(setup.scheduler.max_num_batched_tokens, 2 * most)
        scheduler = replace(setup.scheduler, max_num_seqs=2 * most, max_num_batched_tokens=tokens)
        evidence = f"in {run.num_steps_without_rows:,} steps a request waited while {most} ran"
        yield Trial(f"--max-num-seqs {2 * most}", evidence, WAIT, replace(setup, scheduler=scheduler))


def step_tokens(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Long prompts delay other requests in the same step. If they do, try smaller chunks, which slow the prompts."""
    p50, p99 = (run.latencies.itl_s.percentile(percent) for percent in (50.0, 99.0))
    half = setup.scheduler.max_num_batched_tokens // 2
    if p99 > 3 * p50 and half >= setup.scheduler.max_num_seqs:
        scheduler = replace(setup.scheduler, max_num_batched_tokens=half)
        evidence = f"between tokens p99 is {p99 / p50:.1f} times p50"
        yield Trial(f"--max-num-batched-tokens {half}", evidence, BETWEEN, replace(setup, scheduler=scheduler))


RULES: Final[tuple[Rule, ...]] = (
    more_memory,
    int8_numbers,
    swap_space,
    less_memory,
    eviction,
    more_rows,
    fair_share,
    step_tokens,
    block_size,
    prefix_cache,
)


def trials(run: RecordedRun, setup: EngineSetup) -> list[Trial]:
    """Return the trials that the rules propose for a run. Does not mutate."""
    return [trial for rule in RULES for trial in rule(run, setup)]


def finding(trial: Trial, before: RecordedRun, after: RecordedRun) -> Finding:
    """Return the result of a trial. Does not mutate."""
    gains = [(figure.gain(before, after), figure) for figure in FIGURES if figure is not trial.goal]
    others = tuple(_change(figure, before, after) for gain, figure in gains if gain >= LEAST_GAIN)
    prices = tuple(_change(figure, before, after) for gain, figure in gains if gain <= -MOST_HARM)
    is_gain = trial.goal.gain(before, after) >= LEAST_GAIN
    verdict = (GAIN_AT_A_PRICE if prices else GAIN) if is_gain else NO_GAIN
    return Finding(
        setting=trial.setting,
        evidence=trial.evidence,
        verdict=verdict,
        before=trial.goal.of(before),
        after=trial.goal.of(after),
        goal=_change(trial.goal, before, after),
        others=others,
        prices=prices,
        caveat=trial.caveat,
    )


def _change(figure: Figure, before: RecordedRun, after: RecordedRun) -> str:
    return f"{figure.name} {figure.show(figure.of(before))} → {figure.show(figure.of(after))}"


def _shortage(run: RecordedRun) -> Iterator[tuple[Figure, str]]:
    """Yield the figure to improve and the evidence that more blocks are needed, if any."""
    evicted = run.missed_tokens[MissReason.EVICTED]
    if run.scheduler.num_preemptions:
        yield PREEMPTIONS, f"{run.scheduler.num_preemptions:,} preemptions"
    elif evicted:
        yield HITS, f"{evicted:,} prompt tokens computed again, because their blocks had been evicted"
    elif run.num_steps_without_room > OFTEN * run.num_plans:
        yield WAIT, f"in {run.num_steps_without_room:,} steps a request waited although rows were free"


def _with_blocks(setup: EngineSetup, num_blocks: int, evidence: str, goal: Figure) -> Trial:
    tried = replace(setup, memory=replace(setup.memory, num_blocks=num_blocks))
    return Trial(f"--kv-memory {_as_option(num_blocks * setup.spec.bytes_per_block)}", evidence, goal, tried)


def _as_option(size: int) -> str:
    """Return a size as an option's value, rounded up."""
    return f"{-(-size // MIB)}MiB" if size >= 64 * MIB else f"{-(-size // 1024)}KiB"
