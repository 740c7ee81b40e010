"""Suggestions: rules that look for a cause in a run, and trials that measure another setting.

    RecordedRun ──► rule ──► Trial: a setting, what speaks for it, the figure that it is to better
                               │ the requests of the log again, on an engine with that setting, its steps as long
                               ▼ as the log's own steps say
                             Finding: the figure before and after, what else changed, and a verdict

A rule never advises. It says what is worth trying, and the trial decides: both figures of a finding are simulated, with
the product's scheduler and memory, and differ by the one setting. So what is wrong with the simulation (the times of
steps are fitted) is wrong on both sides. Trials that bring nothing are told as well: they answer a question, too. But
where the figures rest on more than the log, or leave something out, the trial has a caveat: it is told only as a gain.
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
"""A pool of which never more than this share was in use may be smaller."""
OFTEN: Final = 0.02
"""Share of the steps: what happens in fewer is not worth a trial."""


GAIN, GAIN_AT_A_PRICE, NO_GAIN = "a gain", "a gain, at a price", "no gain"
"""Verdicts, in the order in which they are told."""
INT8_CAVEAT: Final = (
    "int8 changes outputs slightly (a mean KL of 0.0009 nat on SmolLM2-135M: benchmarks/RESULTS.md, Quality); "
    "assumes that steps take as long as before"
)


@dataclass(frozen=True, slots=True)
class Figure:
    """Something that a setting may better."""

    name: str
    of: Callable[[RecordedRun], float]
    show: Callable[[float], str]
    more_is_better: bool = False

    def gain(self, before: RecordedRun, after: RecordedRun) -> float:
        """Return by which share of what it was the figure has got better; below 0: worse."""
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
"""Those that every trial is held against."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A setting that is worth a try, and why. `caveat`: what its figures leave out."""

    setting: str
    evidence: str
    goal: Figure
    setup: EngineSetup
    caveat: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trial has shown, as `preemptions 41 → 0`: the goal, what else got better, and what got worse.

    `before` and `after` are the goal as numbers: times in seconds, shares of 1. `caveat`: what they leave out.
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
        """Whether a report has it: always, except advice with a caveat and no gain."""
        return self.verdict != NO_GAIN or not self.caveat


Rule = Callable[[RecordedRun, EngineSetup], Iterator[Trial]]


def more_memory(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Requests that yield, wait for blocks or lose what was cached may want a larger pool."""
    for goal, evidence in _shortage(run):
        for factor in (1.5, 2.0):
            yield _with_blocks(setup, int(setup.memory.num_blocks * factor), evidence, goal)


def int8_numbers(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """They may also want narrower numbers: more blocks in the same bytes."""
    narrow = replace(setup.spec, dtype="int8")
    if narrow.bytes_per_block < setup.spec.bytes_per_block:
        for goal, evidence in _shortage(run):
            blocks, host_blocks = (
                count * setup.spec.bytes_per_block // narrow.bytes_per_block
                for count in (setup.memory.num_blocks, setup.memory.num_host_blocks)
            )
            memory = replace(setup.memory, num_blocks=blocks, num_host_blocks=host_blocks)
            room = f"{evidence}; {blocks:,} blocks would fit, not {setup.memory.num_blocks:,}"
            yield Trial("--kv-dtype int8", room, goal, replace(setup, spec=narrow, memory=memory), INT8_CAVEAT)


def swap_space(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Who yields loses what was computed, unless there is somewhere to move it: room for the most that was lost."""
    if not run.most_lost_blocks:
        return
    size, speed = setup.spec.bytes_per_block, setup.scheduler.swap_bytes_per_s
    cost: StepCost = MovingCost(setup.cost, size / speed)
    caveat = f"assumes that blocks move at {show_bytes(speed)} per second, as --preemption auto does"
    if run.num_swapped:  # then the log knows
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
    """A pool that was never half in use may be too large."""
    num_blocks, most = setup.memory.num_blocks, run.most_used_blocks
    if most < ROOMY * num_blocks and not run.scheduler.num_preemptions:
        evidence = f"never more than {most:,} of {num_blocks:,} blocks were in use"
        yield _with_blocks(setup, max(num_blocks // 2, most), evidence, POOL)


def block_size(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Smaller blocks waste less and are hit more finely; larger ones are fewer to keep books of."""
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
    """Say what the prefix cache brings, or would."""
    if setup.memory.prefix_index == "none":
        tried = replace(setup, memory=replace(setup.memory, prefix_index="hash_chain"))
        yield Trial("--enable-prefix-caching", "prompts are not cached", FIRST_TOKEN, tried)
    else:
        tried = replace(setup, memory=replace(setup.memory, prefix_index="none"))
        evidence = f"{show_share(HITS.of(run))} of the prompt tokens came from the cache"
        yield Trial("--no-enable-prefix-caching", evidence, FIRST_TOKEN, tried)


def eviction(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """What was evicted and missed may be kept by another policy."""
    num_missed = run.missed_requests[MissReason.EVICTED]
    if num_missed:
        evidence = f"{num_missed:,} requests missed blocks that had been evicted"
        other = "fifo" if setup.memory.eviction == "lru" else "lru"
        tried = replace(setup, memory=replace(setup.memory, eviction=other))
        yield Trial(f"--eviction {other}", evidence, HITS, tried)


def fair_share(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Tenants that wait much longer than others may be treated unfairly."""
    waits = sorted(tenant.wait_s.percentile(95.0) for tenant in run.tenants.values())
    if len(waits) > 1 and setup.scheduler.policy != "fair_share" and waits[-1] > 2 * waits[0]:
        evidence = f"tenants wait from {show_seconds(waits[0])} to {show_seconds(waits[-1])} at p95"
        tried = replace(setup, scheduler=replace(setup.scheduler, policy="fair_share"))
        yield Trial("--policy fair_share", evidence, WORST_WAIT, tried)


def more_rows(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Requests that wait for a row may want more of them."""
    most = setup.scheduler.max_num_seqs
    if run.num_steps_without_rows > OFTEN * run.num_plans:
        tokens = max(setup.scheduler.max_num_batched_tokens, 2 * most)
        scheduler = replace(setup.scheduler, max_num_seqs=2 * most, max_num_batched_tokens=tokens)
        evidence = f"in {run.num_steps_without_rows:,} steps a request waited while {most} ran"
        yield Trial(f"--max-num-seqs {2 * most}", evidence, WAIT, replace(setup, scheduler=scheduler))


def step_tokens(run: RecordedRun, setup: EngineSetup) -> Iterator[Trial]:
    """Prompts make requests in the same step wait: less in smaller pieces, but then the prompts take longer."""
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
    """Return what is worth trying after such a run. Does not mutate."""
    return [trial for rule in RULES for trial in rule(run, setup)]


def finding(trial: Trial, before: RecordedRun, after: RecordedRun) -> Finding:
    """Return what a trial has shown. Does not mutate."""
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
    """Yield what speaks for more blocks, and the figure that it is about; nothing where nothing does."""
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
    """Return a size as the command line takes it, rounded up."""
    return f"{-(-size // MIB)}MiB" if size >= 64 * MIB else f"{-(-size // 1024)}KiB"
