"""`quire bench gpu-kernels`: attention and products on a GPU, compared with the limits of its memory and matrices.

The points are those that `quire bench gpu-predictions` predicts. Every step of attention is checked before it is timed.
Compared steps take turns; a time is that of one layer, in a graph over more layers than the caches hold. A point that
fails is named in its row, and the others are measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TypeVar

from quire.instruments.bench.flags import add_choices, add_count, add_counts, add_size
from quire.instruments.bench.gpu_predictions import Assumptions, Point, expected_s, points, prompt_share
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, reason_of, run_benchmark
from quire.reporting.samples import ratios, summarize

if TYPE_CHECKING:
    from quire.cli.machine_limits import Limits
    from quire.compute.torch.attention_run import AttentionStep

Measured = TypeVar("Measured")
PREFIX, OWN, SHARING = 2048, 128, 64
"""Shared tokens, own tokens, and the number of sequences."""
PROMPTS: Final = (4096, 8192, 16384)
MIN_PROMPT_SHARE: Final = 55.0
SMALL_CONTEXT: Final = 40
SMALL_SEQUENCES: Final = 2
PARTS: Final = ("decodes", "prompts", "ratios", "flashinfer", "products", "tiles")
DESCRIPTION = (
    "Measure paged attention and matrix products on a GPU, compared with its memory bandwidth and matrix rate, and "
    "with what was predicted; with --only tiles, find the fastest shapes of attention's tiles. Needs no model."
)


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of a step divided by that of another, and its limit."""

    name: str
    above: AttentionStep
    below: AttentionStep
    bound: float
    at_least: bool = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_choices(parser, "only", PARTS, PARTS[:-1], "measure only these parts")
    add_counts(parser, "rows", (1, 16, 64, 256), "rows per matrix product")
    add_count(parser, "repeat", 20, "repetitions of each measurement: replays of a graph")
    add_size(parser, "read-size", "4GiB", "amount of memory to read when measuring bandwidth")
    add_size(parser, "working-set", "512MiB", "memory to cycle through; must be larger than the caches")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: only to try this command")
    parser.add_argument(
        "--small",
        action="store_true",
        help="short contexts, small matrices, few tiles, in float16: to try this command",
    )


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status, 1 if a point has failed."""
    from quire.compute.torch.device import choose_device, look

    if options.device == "cuda":
        choose_device(look(os.environ), "cuda")
    failures: list[str] = []

    def measure(tell: Tell) -> Iterator[Section]:
        from quire.compute.torch.limits import TorchLimits
        from quire.instruments.bench.gpu_products import measure_products
        from quire.instruments.bench.gpu_tiles import measure_tiles

        limits = TorchLimits(options.device, "float32" if options.small else "bfloat16", options.read_size)
        bench = GpuKernelBench(limits, options, tell, failures)
        if "decodes" in options.only:
            yield from bench.measure_decodes(points())
        if "prompts" in options.only:
            yield from bench.measure_prompts(PROMPTS)
        if "ratios" in options.only:
            yield from bench.measure_ratios("Side by side", compared())
        if "flashinfer" in options.only and find_spec("flashinfer") is not None:
            yield from bench.measure_ratios("Compared with FlashInfer", beside_flashinfer())
        if "products" in options.only:
            yield from measure_products(bench)
        if "tiles" in options.only:
            yield from measure_tiles(bench)

    return run_benchmark(options, "GPU kernels", measure) or int(bool(failures))


def compared() -> tuple[Ratio, ...]:
    """Return the comparisons of quire's own steps."""
    from quire.compute.torch.attention_run import AttentionStep

    plain, long = AttentionStep((4096,) * 32), AttentionStep((32768,))
    prompt, sharing = AttentionStep((8192,), num_queries=8192), AttentionStep((PREFIX + OWN,) * SHARING)
    ideal = SHARING * (PREFIX + OWN) / (PREFIX + SHARING * OWN)
    question = AttentionStep((30_050,), num_queries=50)
    return (
        Ratio("paged / contiguous, 32 × 4,096", plain, replace(plain, contiguous=True), 1.03),
        Ratio("paged / contiguous, a prompt of 8,192", prompt, replace(prompt, contiguous=True), 1.05),
        Ratio("50 tokens behind 30,000 cached / a decode there", question, replace(question, num_queries=1), 3.0),
        Ratio("blocks of 16 / of 128", plain, replace(plain, block_size=128), 1.02),
        Ratio("int8 / bfloat16", replace(plain, kv_dtype="int8"), plain, 0.60),
        Ratio("fp8 / bfloat16", replace(plain, kv_dtype="fp8"), plain, 0.60),
        Ratio("batch-invariant / fastest, 1 × 32,768", replace(long, batch_invariant=True), long, 1.15),
        Ratio("batch-invariant / fastest, 32 × 4,096", replace(plain, batch_invariant=True), plain, 1.03),
        Ratio(
            f"not shared / shared, {SHARING} × ({PREFIX:,} + {OWN}); by bytes {ideal:.1f}",
            sharing,
            replace(sharing, shared_tokens=PREFIX),
            0.70 * ideal,
            at_least=True,
        ),
    )


def beside_flashinfer() -> tuple[Ratio, ...]:
    """Return steps of quire's kernels, each compared with the same step of FlashInfer."""
    from quire.compute.torch.attention_run import AttentionStep

    steps = {
        "1 × 32,768": AttentionStep((32768,)),
        "32 × 4,096": AttentionStep((4096,) * 32),
        "128 × 1,024": AttentionStep((1024,) * 128),
        "16 × 8,192, heads 64/8": AttentionStep((8192,) * 16, num_heads=64),
        "a prompt of 8,192": AttentionStep((8192,), num_queries=8192),
    }
    return tuple(
        Ratio(f"ours / FlashInfer's, {name}", step, replace(step, backend="flashinfer"), 1.0)
        for name, step in steps.items()
    )


def small(step: AttentionStep) -> AttentionStep:
    """Return a step with little of everything, in float16: Triton's interpreter knows no bfloat16."""
    return replace(
        step,
        contexts=tuple(min(context, SMALL_CONTEXT) for context in step.contexts[:SMALL_SEQUENCES]),
        num_heads=step.num_heads // step.num_kv_heads,
        num_kv_heads=1,
        num_queries=min(step.num_queries, SMALL_CONTEXT),
        shared_tokens=min(step.shared_tokens, step.block_size),
        dtype="float16",
        kv_dtype="float16" if step.kv_dtype == "bfloat16" else step.kv_dtype,
    )


class GpuKernelBench:
    """Measures on a device; `options` are those of the command, `failures` collects the points that fail."""

    def __init__(self, limits: Limits, options: argparse.Namespace, tell: Tell, failures: list[str]) -> None:
        self.limits = limits
        self.options = options
        self.tell = tell
        self._failures = failures

    def tried(self, name: str, measure: Callable[[], Measured]) -> tuple[Measured | None, str]:
        """Return what is measured; or None, and why it failed. Mutates the failures."""
        self.tell(name)
        try:
            return measure(), ""
        except Exception as error:  # any failure is of this point alone, and the others are measured
            why = reason_of(error)
            self.tell(f"failed: {why}")
            self._failures.append(name)
            return None, why

    def measure_decodes(self, decodes: Sequence[Point]) -> Iterator[Section]:
        """Measure steps of decodes, compared with the bandwidth; yields a longer section after every point."""
        from quire.compute.torch.attention_run import AttentionStep

        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        header = ("sequences × context", "KV", "µs", "% of the bandwidth", "predicted", "goal")
        for point in decodes:
            for kv_dtype in ("bfloat16",) if point.number_bytes == 2 else ("int8", "fp8"):
                step = AttentionStep(point.contexts, point.num_heads, point.num_kv_heads, kv_dtype=kv_dtype)
                bandwidth = self.limits.bandwidth()
                found, why = self.tried(f"decodes: {point.name}, {kv_dtype}", partial(self.timed, step))
                if found is None:
                    rows.append((point.name, kv_dtype, why, "–", "–", point.goal))
                else:
                    step, [seconds] = self.asked(step), found
                    shares = [100 * step.num_bytes / second / bandwidth for second in seconds]
                    expected = expected_s(point, replace(Assumptions(), bandwidth=bandwidth))
                    predicted = f"{100 * point.num_bytes / bandwidth / expected:.0f} %"
                    times = cell(summarize([1e6 * second for second in seconds]))
                    rows.append((point.name, kv_dtype, times, cell(summarize(shares)), predicted, point.goal))
                    samples[f"{point.name}, {kv_dtype}"] = {"seconds": seconds, "bandwidth": bandwidth}
                yield Section("Decode attention", self.text(), header, rows, samples)

    def measure_prompts(self, lengths: Sequence[int]) -> Iterator[Section]:
        """Measure whole prompts, compared with the matrix rate; yields a longer section after every point."""
        from quire.compute.torch.attention_run import AttentionStep

        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        for length in lengths:
            step, name = AttentionStep((length,), num_queries=length), f"{length:,} tokens"
            rate = self.limits.arithmetic() or 0.0
            found, why = self.tried(f"prompts: {name}", partial(self.timed, step))
            if found is None:
                rows.append((name, why, "–", "–"))
            else:
                step, [seconds] = self.asked(step), found
                shares = summarize([100 * step.num_operations / second / rate for second in seconds])
                predicted = f"{100 * prompt_share(replace(Assumptions(), rate=rate), length):.0f} %"
                rows.append((name, cell(summarize([1e6 * second for second in seconds])), cell(shares), predicted))
                samples[name] = {"seconds": seconds, "rate": rate}
                what = f"attention of a prompt of {name}: % of the matrix rate"
                goals.append(Goal(what, shares.median, MIN_PROMPT_SHARE, at_least=True))
            header = ("prompt", "µs", "% of the matrix rate", "predicted")
            yield Section("Prompts", self.text(), header, rows, samples, goals)

    def measure_ratios(self, title: str, wanted: Sequence[Ratio]) -> Iterator[Section]:
        """Measure steps in turn, compared with each other; yields a longer section after every pair."""
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        for ratio in wanted:
            times, why = self.tried(ratio.name, partial(self.timed, ratio.above, ratio.below))
            if times is None:
                rows.append((ratio.name, why))
            else:
                above, below = times
                found = summarize(ratios(above, below))
                goals.append(Goal(ratio.name, found.median, ratio.bound, at_least=ratio.at_least))
                rows.append((ratio.name, cell(found)))
                samples[ratio.name] = {"above": above, "below": below}
            yield Section(title, self.text(), ("what", "ratio of times"), rows, samples, goals)

    def asked(self, step: AttentionStep) -> AttentionStep:
        """Return the step, or with `--small` a smaller one."""
        return small(step) if self.options.small else step

    def timed(self, *steps: AttentionStep) -> list[list[float]]:
        """Return the seconds of a layer of each step, in turn, after a check."""
        from quire.compute.torch.attention_run import AttentionRun

        runs = [AttentionRun(self.asked(step), self.options.device, self.options.working_set) for step in steps]
        for each in runs:
            each.check()
        turns = [[each.seconds() for each in runs] for _ in range(self.options.repeat)]
        return [list(seconds) for seconds in zip(*turns, strict=True)]

    def text(self) -> str:
        """Return how it was measured."""
        size_mib = self.options.working_set / 2**20
        small = " **Small: only to try the command.**" if self.options.small else ""
        return (
            f"{self.limits.name}; head_dim 128, blocks of 16 in random order unless stated. Median of "
            f"{self.options.repeat} runs (min–max) of a graph over layers of {size_mib:,.0f} MiB together, the time of "
            f"one layer.{small}"
        )
