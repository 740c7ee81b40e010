"""Attention on a GPU: measures points, and compares them with limits and with each other.

A failed point is reported in its row, and the others are still measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from quire.instruments.bench.gpu_predictions import Assumptions, Point, expected_s, prompt_share
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, reason_of
from quire.reporting.samples import ratios, summarize

if TYPE_CHECKING:
    from quire.cli.machine_limits import Limits
    from quire.compute.torch.attention_run import AttentionStep

Measured = TypeVar("Measured")
MIN_PROMPT_SHARE: Final = 55.0
SMALL_CONTEXT: Final = 40
SMALL_SEQUENCES: Final = 2


@dataclass(frozen=True, slots=True)
class Ratio:
    """The time of a step divided by that of another, and its limit."""

    name: str
    above: AttentionStep
    below: AttentionStep
    bound: float
    at_least: bool = False


def small(step: AttentionStep) -> AttentionStep:
    """Return a small version of a step, in float16: Triton's interpreter does not support bfloat16."""
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
        """Return the measurement; or None, and the reason of the failure. Mutates the failures."""
        self.tell(name)
        try:
            return measure(), ""
        except Exception as error:  # a failure affects only this point
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
        """Return a description of the measurement."""
        size_mib = self.options.working_set / 2**20
        small = " **Small sizes: only a test of the command.**" if self.options.small else ""
        return (
            f"{self.limits.name}; head_dim 128, blocks of 16 in random order unless stated. Median of "
            f"{self.options.repeat} runs (min–max) of a graph over layers of {size_mib:,.0f} MiB in total; time of one "
            f"layer.{small}"
        )
