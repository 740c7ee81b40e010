"""`quire bench latency`: single steps, compared with the least time that a step needs.

A step of decodes must read the weights and the keys and values of its sequences. Its bound is their bytes divided by
the bandwidth, measured right before. A prompt is compared with the arithmetic of the instruction set, which also bounds
steps of many decodes.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from quire.cli.machine_limits import limits_of
from quire.core.byte_sizes import format_bytes
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, InvalidConfigError
from quire.engine.commands import Abort
from quire.instruments.bench.disturbance import CHAT_TOKENS, measure_disturbance
from quire.instruments.bench.flags import add_count, add_counts, add_model_options, add_size
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.model_costs import ModelCosts, model_costs
from quire.instruments.bench.shapes import measured_config
from quire.instruments.bench.throughput import describe_engine
from quire.instruments.bench.workload_file import WorkloadRequest
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import percentile, summarize

LARGE_MODEL_BYTES = 256 << 20
"""A model of at least this size fits into no cache: the bandwidth bounds it, and goals apply."""

MIN_DECODE_SHARE = {1: 82.0, 4: 82.0, 16: 82.0, 64: 75.0}
MIN_DECODE_SHARE_AVX2 = {1: 70.0}
MAX_ENGINE_SHARE = {32: 3.0}
MIN_PREFILL_SHARE = 40.0

HEADROOM = 1.03
"""The factor by which the pool exceeds the need, because admission keeps some blocks free."""


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Steps of decodes: seconds of each, in total, outside of the executor and in the decoder; and their bound."""

    step_s: list[float]
    engine_s: float
    decoder_s: float
    kv_bytes: float  # mean over the steps
    num_operations: float  # likewise
    bandwidth: float
    arithmetic: float | None
    bound_s: float | None

    @property
    def outside_share(self) -> float:
        """The time outside of the decoder, in percent: sampling, the arrays of a step, and the engine itself."""
        return 100 * (1 - self.decoder_s / sum(self.step_s))

    @property
    def bound_share(self) -> float:
        """The bound in percent of the median step."""
        return 100 * (self.bound_s or 0.0) / summarize(self.step_s).median

    @property
    def arithmetic_share(self) -> float | None:
        """Percent of the machine's arithmetic that the median step reached."""
        if not self.num_operations or self.arithmetic is None:
            return None
        return 100 * self.num_operations / summarize(self.step_s).median / self.arithmetic


@dataclass(frozen=True, slots=True)
class PrefillRun:
    """A prompt: seconds to its first token, and the machine's arithmetic at that time."""

    first_token_s: float
    num_operations: int | None
    arithmetic: float | None

    @property
    def arithmetic_share(self) -> float | None:
        """Percent of the machine's arithmetic that the prompt reached."""
        if self.num_operations is None or self.arithmetic is None:
            return None
        return 100 * self.num_operations / self.first_token_s / self.arithmetic


DESCRIPTION = (
    "Measure steps of decodes for contexts and numbers of sequences, compared with the time to read weights and KV "
    "memory once, and the time to the first token of prompts."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_counts(parser, "contexts", (256,), "tokens of the context that a step of decodes sees")
    add_counts(parser, "sequences", (1, 4, 16, 32, 64), "sequences that decode together")
    add_counts(parser, "prompts", (512, 1024, 2048, 4096), "tokens of prompts, for the time to the first token")
    add_count(parser, "chats", 16, "chats that run during the longest of the prompts")
    add_count(parser, "steps", 32, "decode steps in a run")
    add_count(parser, "repeat", 5, "repetitions of each measurement")
    add_size(parser, "read-size", "1GiB", "amount of memory to read when measuring bandwidth")
    add_model_options(parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""

    def measure(tell: Tell) -> Iterator[Section]:
        with measured_config(options) as settings:
            config = with_room(settings, max(*options.sequences, options.chats + 1))
            tell(f"loading {config.model}")
            with MeasuredEngine(config) as engine:
                engine.warm_up()
                bench = LatencyBench(engine, options, tell)
                sections = [bench.measure_decode(), bench.measure_prefill(), *bench.measure_disturbance()]
                yield describe_engine(engine)
                yield from sections

    return run_benchmark(options, "Latency", measure)


def with_room(config: EngineConfig, num_sequences: int) -> EngineConfig:
    """Return the settings with room for this many sequences in a step, on any device."""
    least = config.resolved()
    sequences = config.max_num_seqs if least.max_num_seqs >= num_sequences else num_sequences
    tokens = config.max_num_batched_tokens if least.max_num_batched_tokens >= num_sequences else num_sequences
    return replace(config, max_num_seqs=sequences, max_num_batched_tokens=tokens)


class LatencyBench:
    """Measures steps of an engine; `options` are those of the command."""

    def __init__(self, engine: MeasuredEngine, options: argparse.Namespace, tell: Tell) -> None:
        self._engine = engine
        self._options = options
        self._tell = tell
        self._limits = limits_of(engine.blueprint.backend.facts, options.read_size)
        self._costs: ModelCosts | None = model_costs(engine.blueprint.model, engine.blueprint.backend.facts)
        self._random = random.Random(0)
        self._has_goals = self._costs is not None and self._costs.step_bytes >= LARGE_MODEL_BYTES

    # ---- decode -----------------------------------------------------------------------------------------------

    def measure_decode(self) -> Section:
        """Measure every context with every number of sequences, in turn."""
        cases = [
            (context, count)
            for context in self._options.contexts
            for count in self._options.sequences
            if self._fits("context", context + self._options.steps)
        ]
        for case in cases:
            self._require_room(*case)
        runs: dict[tuple[int, int], list[DecodeRun]] = {case: [] for case in cases}
        for index in range(self._options.repeat):
            self._tell(f"decode: run {index + 1} of {self._options.repeat}")
            for case in cases:
                runs[case].append(self._decode(*case))
        text = (
            f"{self._options.steps} steps a run, median of {self._options.repeat} runs (min–max). The bound is the "
            "time to read the weights and the keys and values once, at the bandwidth measured right before."
        )
        header = ("context", "sequences", "step, ms", "p99, ms", "tok/s", "bound, ms", "% of bound", "GB/s read")
        shares = ("% of the arithmetic", "outside of the decoder, %", "… outside of the executor, %")
        rows = [self._decode_row(case, found) for case, found in runs.items()]
        samples: dict[str, object] = {
            f"{c} tokens, {n} sequences": [asdict(r) for r in f] for (c, n), f in runs.items()
        }
        return Section("Decode", text, (*header, *shares), rows, samples, self._decode_goals(runs))

    def _decode(self, context: int, num_sequences: int) -> DecodeRun:
        """Run prompts until all sequences decode, then time steps; the middle step has the nominal context length."""
        engine, num_steps = self._engine, self._options.steps
        bandwidth, arithmetic = self._limits.bandwidth(), self._limits.arithmetic()
        started = set[str]()
        length = max(1, context - num_steps // 2)
        for index in range(num_sequences):
            engine.add(str(index), WorkloadRequest(self._prompt(length), self._longest_output(length)), seed=index)
        while len(started) < num_sequences:
            started.update(update.request_id for update in engine.client.receive() if update.token_ids)
        engine.watch.reset()
        step_s, kv_bytes, operations = [], [], []
        for _ in range(num_steps):
            begun = time.perf_counter()
            engine.client.receive()
            step_s.append(time.perf_counter() - begun)
            lengths = self._check_step(num_sequences)
            kv_bytes.append(0 if self._costs is None else self._costs.kv_bytes(lengths))
            operations.append(0 if self._costs is None else self._costs.decode_operations(lengths))
        for request_id in started:
            engine.client.send(Abort(request_id))
        mean_kv_bytes = sum(kv_bytes) / num_steps
        bound_s = None if self._costs is None else (self._costs.step_bytes + mean_kv_bytes) / bandwidth
        engine_s, decoder_s = sum(step_s) - engine.watch.executor_s, engine.watch.decoder_s
        return DecodeRun(
            step_s=step_s,
            engine_s=engine_s,
            decoder_s=decoder_s,
            kv_bytes=mean_kv_bytes,
            num_operations=sum(operations) / num_steps,
            bandwidth=bandwidth,
            arithmetic=arithmetic,
            bound_s=bound_s,
        )

    def _check_step(self, num_sequences: int) -> list[int]:
        """Return the number of tokens that each row of the last step attended to; raises unless all were decodes."""
        plan = self._engine.watch.last_plan
        if plan is None or len(plan.rows) != num_sequences or plan.num_tokens != num_sequences:
            raise ExecutionError(f"{num_sequences} sequences do not decode together")
        return [start + count for start, count in zip(plan.starts, plan.counts, strict=True)]

    def _decode_row(self, case: tuple[int, int], runs: list[DecodeRun]) -> tuple[str, ...]:
        context, count = case
        medians = [summarize(run.step_s).median for run in runs]
        bounds = [run.bound_s for run in runs if run.bound_s is not None]
        arithmetic = [run.arithmetic_share for run in runs if run.arithmetic_share is not None]
        read = [] if self._costs is None else [self._costs.step_bytes + run.kv_bytes for run in runs]
        return (
            f"{context:,}",
            str(count),
            cell(summarize([1e3 * median for median in medians])),
            cell(summarize([1e3 * percentile(run.step_s, 0.99) for run in runs])),
            cell(summarize([count / median for median in medians])),
            cell(summarize([1e3 * bound for bound in bounds]) if bounds else None),
            cell(summarize([run.bound_share for run in runs]) if bounds else None),
            cell(summarize([size / step / 1e9 for size, step in zip(read, medians, strict=True)]) if read else None),
            cell(summarize(arithmetic) if arithmetic else None),
            cell(summarize([run.outside_share for run in runs])),
            cell(summarize([100 * run.engine_s / sum(run.step_s) for run in runs])),
        )

    def _decode_goals(self, runs: dict[tuple[int, int], list[DecodeRun]]) -> list[Goal]:
        goals = []
        bounds = MIN_DECODE_SHARE_AVX2 if self._limits.name.startswith("avx2") else MIN_DECODE_SHARE
        for (context, count), found in runs.items() if self._has_goals else ():
            what = f"context {context:,}, {count} sequences"
            if count in bounds and context == 256:
                share = summarize([run.bound_share for run in found]).median
                goals.append(Goal(f"{what}: % of the bound", share, bounds[count], at_least=True))
            if count in MAX_ENGINE_SHARE:
                share = summarize([run.outside_share for run in found]).median
                goals.append(Goal(f"{what}: outside of the decoder, %", share, MAX_ENGINE_SHARE[count]))
        return goals

    # ---- prefill ----------------------------------------------------------------------------------------------

    def measure_prefill(self) -> Section:
        """Measure the time to the first token of prompts of every length."""
        lengths = [length for length in self._options.prompts if self._fits("prompt", length + 1)]
        runs: dict[int, list[PrefillRun]] = {length: [] for length in lengths}
        for index in range(self._options.repeat):
            self._tell(f"prefill: run {index + 1} of {self._options.repeat}")
            for length in lengths:
                runs[length].append(self._prefill(length))
        text = (
            f"One prompt at a time, median of {self._options.repeat} runs (min–max). The arithmetic is that of "
            f"{self._limits.name} on registers, measured right before."
        )
        header = ("prompt", "first token, ms", "tok/s", "GFLOP/s", "% of the arithmetic")
        rows = [self._prefill_row(length, found) for length, found in runs.items()]
        goals = []
        for length, found in runs.items() if self._has_goals else ():
            shares = [run.arithmetic_share for run in found if run.arithmetic_share is not None]
            if shares and 1024 <= length <= 4096:
                share = summarize(shares).median
                goals.append(
                    Goal(f"prompt of {length:,}: % of the arithmetic", share, MIN_PREFILL_SHARE, at_least=True)
                )
        samples: dict[str, object] = {f"{length} tokens": [asdict(run) for run in f] for length, f in runs.items()}
        return Section("Prefill", text, header, rows, samples, goals)

    def _prefill(self, length: int) -> PrefillRun:
        arithmetic = self._limits.arithmetic()
        run = self._engine.run([WorkloadRequest(self._prompt(length), 1)])
        operations = None if self._costs is None else self._costs.prompt_operations(length)
        return PrefillRun(run.first_token_s["0"], operations, arithmetic)

    def _prefill_row(self, length: int, runs: list[PrefillRun]) -> tuple[str, ...]:
        rates = [run.num_operations / run.first_token_s / 1e9 for run in runs if run.num_operations is not None]
        shares = [run.arithmetic_share for run in runs if run.arithmetic_share is not None]
        return (
            f"{length:,}",
            cell(summarize([1e3 * run.first_token_s for run in runs])),
            cell(summarize([length / run.first_token_s for run in runs])),
            cell(summarize(rates) if rates else None),
            cell(summarize(shares) if shares else None),
        )

    def measure_disturbance(self) -> Iterator[Section]:
        """Measure chats during the longest of the prompts."""
        options = self._options
        fitting = [length for length in options.prompts if length < self._engine.client.limits.max_model_len]
        if fitting:
            sizes = options.chats, max(fitting), options.steps
            self._require_room(CHAT_TOKENS + max(fitting) // options.chats, options.chats + 1)
            section = measure_disturbance(self._engine, sizes, options.repeat, self._prompt, self._tell)
            yield section if self._has_goals else replace(section, goals=[])

    # ---- prompts ----------------------------------------------------------------------------------------------

    def _prompt(self, length: int) -> tuple[int, ...]:
        """Return random ids: no two prompts share a prefix, so that there are no cache hits."""
        return tuple(self._random.randrange(self._engine.vocab_size) for _ in range(length))

    def _require_room(self, context: int, num_sequences: int) -> None:
        """Raise unless this many sequences can decode together: waiting sequences would not be measured."""
        report = self._engine.blueprint.report
        plan, spec = report.plan, self._engine.blueprint.backend.facts.kv_spec
        # The first sequences decode while the prompts of the others are computed.
        waiting = num_sequences * context // report.max_num_batched_tokens + num_sequences
        num_tokens = min(context + self._options.steps + waiting, plan.max_model_len)
        needed = math.ceil(HEADROOM * num_sequences * spec.num_blocks_for(num_tokens)) + 1
        if needed > plan.num_blocks:
            allowed = (
                f"{format_bytes(needed * plan.bytes_per_block)} or more, for {num_sequences} sequences that decode "
            )
            allowed += f"together at a context of {context}"
            raise InvalidConfigError("kv_memory", format_bytes(plan.num_blocks * plan.bytes_per_block), allowed)

    def _longest_output(self, prompt_length: int) -> int:
        return max(1, self._engine.client.limits.max_model_len - prompt_length)

    def _fits(self, what: str, num_tokens: int) -> bool:
        most = self._engine.client.limits.max_model_len
        if num_tokens > most:
            self._tell(f"left out: a {what} that takes {num_tokens:,} tokens; a sequence can have {most:,}")
        return num_tokens <= most
