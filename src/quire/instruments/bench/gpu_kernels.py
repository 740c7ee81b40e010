"""`quire bench gpu-kernels`: attention and products on a GPU, compared with the limits of its memory and matrices.

The points are those that `quire bench gpu-predictions` predicts. Every step of attention is checked before it is timed.
Compared steps take turns; times are per layer, in a graph over more layers than the caches hold. A failed point is
reported in its row, and the others are still measured.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Final

from quire.instruments.bench.flags import add_choices, add_count, add_counts, add_size
from quire.instruments.bench.gpu_attention import GpuKernelBench, Ratio
from quire.instruments.bench.gpu_predictions import points
from quire.reporting.report import Section
from quire.reporting.results import Tell, run_benchmark

PREFIX, OWN, SHARING = 2048, 128, 64
"""Shared tokens, own tokens, and the number of sequences."""
PROMPTS: Final = (4096, 8192, 16384)
PARTS: Final = ("decodes", "prompts", "ratios", "flashinfer", "products", "tiles")
DESCRIPTION = (
    "Measure paged attention and matrix products on a GPU, compared with its memory bandwidth and matrix rate, and "
    "with predictions; with --only tiles, find the fastest shapes of attention's tiles. Needs no model."
)


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
    """Measure, print, and write the requested files; returns the exit status, 1 if a point failed."""
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
