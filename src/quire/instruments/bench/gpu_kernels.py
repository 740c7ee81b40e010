"""`quire bench kernels --device cuda`: paged attention on a GPU, compared with the limits of its memory and matrices.

The points are those that `quire bench gpu-predictions` predicts. Every step is checked before it is timed. Compared
steps take turns; a time is that of one layer, in a graph over more layers than the caches hold.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from quire.instruments.bench.gpu_predictions import Point, points
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import ratios, summarize

if TYPE_CHECKING:
    from quire.cli.machine_limits import Limits
    from quire.compute.torch.attention_run import AttentionStep

PREFIX, OWN, SHARING = 2048, 128, 64
"""Shared tokens, own tokens, and the number of sequences."""
MIN_PROMPT_SHARE: Final = 55.0


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of a step divided by that of another, and its limit."""

    name: str
    above: AttentionStep
    below: AttentionStep
    bound: float
    at_least: bool = False


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    from quire.compute.torch.device import choose_device, look

    choose_device(look(os.environ), "cuda")

    def measure(tell: Tell) -> Iterator[Section]:
        from quire.compute.torch.limits import TorchLimits

        limits = TorchLimits("cuda", "bfloat16", options.read_size)
        bench = GpuKernelBench(limits, "cuda", options, tell)
        yield bench.measure_decodes(points())
        yield bench.measure_prompts((4096, 8192, 16384))
        yield bench.measure_ratios(compared())
        if find_spec("flashinfer") is not None:
            yield replace(bench.measure_ratios(beside_flashinfer()), title="Compared with FlashInfer")

    return run_benchmark(options, "GPU kernels", measure)


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


class GpuKernelBench:
    """Measures attention on a device, with queries of a dtype; `options`: those of the command."""

    def __init__(
        self, limits: Limits, device: str, options: argparse.Namespace, tell: Tell, *, dtype: str = "bfloat16"
    ) -> None:
        self._limits = limits
        self._device = device
        self._dtype = dtype
        self._options = options
        self._tell = tell

    def measure_decodes(self, decodes: Sequence[Point]) -> Section:
        """Measure steps of decodes, compared with the bandwidth."""
        from quire.compute.torch.attention_run import AttentionStep

        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        for point in decodes:
            kv_dtypes = (self._dtype,) if point.number_bytes == 2 else ("int8", "fp8")
            for kv_dtype in kv_dtypes:
                step = AttentionStep(
                    point.contexts, point.num_heads, point.num_kv_heads, dtype=self._dtype, kv_dtype=kv_dtype
                )
                bandwidth = self._limits.bandwidth()
                [seconds] = self._timed(step)
                shares = [100 * step.num_bytes / second / bandwidth for second in seconds]
                times = cell(summarize([1e6 * second for second in seconds]))
                rows.append((point.name, kv_dtype, times, cell(summarize(shares)), point.goal))
                samples[f"{point.name}, {kv_dtype}"] = {"seconds": seconds, "bandwidth": bandwidth}
        header = ("sequences × context", "KV", "µs", "% of the bandwidth", "goal")
        return Section("Decode attention", self._text(), header, rows, samples)

    def measure_prompts(self, lengths: Sequence[int]) -> Section:
        """Measure whole prompts, compared with the matrix rate."""
        from quire.compute.torch.attention_run import AttentionStep

        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        for length in lengths:
            step = AttentionStep((length,), num_queries=length, dtype=self._dtype, kv_dtype=self._dtype)
            name = f"{length:,} tokens"
            rate = self._limits.arithmetic() or 0.0
            [seconds] = self._timed(step)
            shares = summarize([100 * step.num_operations / second / rate for second in seconds])
            rows.append((name, cell(summarize([1e6 * second for second in seconds])), cell(shares)))
            samples[name] = {"seconds": seconds, "rate": rate}
            what = f"attention of a prompt of {name}: % of the matrix rate"
            goals.append(Goal(what, shares.median, MIN_PROMPT_SHARE, at_least=True))
        return Section("Prompts", self._text(), ("prompt", "µs", "% of the matrix rate"), rows, samples, goals)

    def measure_ratios(self, wanted: Sequence[Ratio]) -> Section:
        """Measure steps in turn, compared with each other."""
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        for ratio in wanted:
            above, below = self._timed(ratio.above, ratio.below)
            found = summarize(ratios(above, below))
            goals.append(Goal(ratio.name, found.median, ratio.bound, at_least=ratio.at_least))
            rows.append((ratio.name, cell(found)))
            samples[ratio.name] = {"above": above, "below": below}
        return Section("Side by side", self._text(), ("what", "ratio of times"), rows, samples, goals)

    def _timed(self, *steps: AttentionStep) -> list[list[float]]:
        """Return the seconds of a layer of each step, in turn, after a check."""
        from quire.compute.torch.attention_run import AttentionRun

        runs = [AttentionRun(step, self._device, self._options.working_set) for step in steps]
        for each in runs:
            self._tell(f"attention: {each.step}")
            each.check()
        turns = [[each.seconds() for each in runs] for _ in range(self._options.repeat)]
        return [list(seconds) for seconds in zip(*turns, strict=True)]

    def _text(self) -> str:
        return (
            f"{self._limits.name}; head_dim 128, blocks of 16 in random order unless stated. Median of "
            f"{self._options.repeat} runs (min–max) of a graph over layers of "
            f"{self._options.working_set / 2**20:,.0f} MiB together, the time of one layer."
        )
