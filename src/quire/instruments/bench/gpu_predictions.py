"""`quire bench gpu-predictions`: predicts performance on a GPU from bytes and operations, without that GPU.

    bound        bytes / bandwidth, or operations / rate: ceilings measured on one such device
    expected     also launches, the warm-up of a stream of loads, waves of programs, shares of the ceilings

All assumptions are in `Assumptions` and in the report. They were made before the engine ran. A review of the compiled
code revised them, because they underestimated loads that wait for each other, slow starts of kernels, draws, and narrow
products of attention. If a measurement differs, either one of these numbers or the engine is wrong. To find out which,
compare prediction and measurement: `quire bench gpu-kernels` and `gpu-engine` print both.
"""

from __future__ import annotations

import argparse
import math
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Final

from quire.cli.model_shapes import find_shape
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.step import StepPlan
from quire.reporting.report import Section
from quire.reporting.results import Tell, run_benchmark
from quire.simulate.cost.roofline import RooflineCost
from quire.simulate.hardware import Hardware, find_hardware
from quire.simulate.model_shape import ModelShape
from quire.simulate.replica import EngineSetup, PagedEngine
from quire.simulate.roofline import Numbers, Roofline
from quire.simulate.simulation import Simulation
from quire.simulate.workload.offered import OfferedRequest, OpenLoop

HEAD_DIM: Final = 128
INVARIANT_ROWS: Final = 128
"""The rows of a product's tile, see `quire.compute.torch.products`."""
PROMPT_ROWS: Final = 128
"""The rows of a tile of a prompt's scores, see `quire.compute.torch.kernels.tile_shape`."""
NANO_SEQUENCES: Final = 256
SPLITS: Final = (128, 256, 512, 1024)
SINGLE_TOKENS: Final = 512
RATIOS: Final = (
    "Keys and values that rows share are read once, and multiplied with all of these rows. The two launches have a "
    "fixed cost, so small steps gain less than their bytes suggest. Block ids are loaded a tile ahead, so they cost "
    "only their bytes: four for each block and head, in addition to the content. In attention of prompts each score "
    "needs an exponent and some float32 operations between two products. The expected share assumes that none of these "
    "overlap with products; the bound counts only the products. Batch-invariant products have tiles of 128 rows, and "
    "each tile reads the weights."
)


@dataclass(frozen=True, slots=True)
class Assumptions:
    """The assumptions about an H200 and an engine on it."""

    bandwidth: float = 4.3e12  # bytes per second of a copy, both directions: measured once on such a device
    rate: float = 790e12  # bfloat16 operations per second on random numbers: also measured once
    num_multiprocessors: int = 132
    programs_each: int = 2  # as shared memory allows, see the compiled kernels
    multiprocessor_bandwidth: float = 100e9  # loads in flight / their latency: 80 KB / 0.8 µs
    program_bandwidth: float = 30e9  # of one program: a tile of 64 tokens in 1.1 µs, in the first run
    full_share: float = 0.93  # of the bandwidth, if all multiprocessors load
    launch_s: float = 2.5e-6  # of a kernel in a graph, until it loads at full speed
    latency_s: float = 0.7e-6  # of a load whose address is the result of another
    loads_in_a_row: int = 3  # such loads at the start of a task: its row, its tokens, its blocks
    parts_at_once: int = 16  # parts of a row that a merge loads before it waits
    split_tokens: int = 256
    product_read_share: float = 0.80  # of the bandwidth, in products of few rows
    product_rate_share: float = 0.65  # of the rate, in products of many rows: narrow matrices leave some SMs idle
    attention_rate_share: float = 0.5  # of the rate, in attention of many rows to the same keys
    attention_product_share: float = 0.70  # of the rate, in the two products of such attention alone: 64 keys at a time
    clock: float = 1.755e9  # cycles per second
    exponents_per_turn: int = 16  # per cycle of a multiprocessor
    floats_per_turn: int = 128  # float32 operations per cycle of a multiprocessor
    floats_per_score: int = 6  # the highest, the difference, the sum, the conversion; sums of 128, rescaled for 64 keys
    draw_bytes: int = 24  # per logit, float32: read twice; with top_k or top_p, an integer written and read
    kernels_per_layer: int = 10
    eager_launch_s: float = 24e-6  # CPU time for each kernel launched separately: see tests/gpu/host_time.py
    host_s: float = 1.0e-3  # CPU time of a step of decodes, in ms: scheduling 0.15, inputs and draws 0.75, a graph 0.1


@dataclass(frozen=True, slots=True)
class Point:
    """A step of decodes in one layer: contexts of the sequences, heads, bytes per number; and the goal."""

    name: str
    contexts: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    goal: str
    number_bytes: float = 2.0

    @property
    def token_bytes(self) -> float:
        """The bytes of a token's key and value in one KV head, with their scales."""
        return 2 * (HEAD_DIM * self.number_bytes + (4 if self.number_bytes < 2 else 0))

    @property
    def num_bytes(self) -> float:
        """The bytes read and written: every key and value once, queries and outputs."""
        rows = 2 * 2 * len(self.contexts) * self.num_heads * HEAD_DIM
        return sum(self.contexts) * self.num_kv_heads * self.token_bytes + rows


def points() -> tuple[Point, ...]:
    """Return the points at which decode attention will be measured."""
    mixed = random.Random(0)
    contexts = tuple(min(2048, max(64, round(mixed.lognormvariate(math.log(400), 0.7)))) for _ in range(256))
    same = Point("32 × 4,096, heads 32/8", (4096,) * 32, 32, 8, "≥ 85 %")
    return (
        Point("1 × 4,096, heads 32/8", (4096,), 32, 8, "≤ 14 µs"),
        Point("1 × 32,768, heads 32/8", (32768,), 32, 8, "≥ 80 %"),
        Point("1 × 131,072, heads 32/8", (131072,), 32, 8, "≥ 85 %"),
        Point("8 × 4,096, heads 32/8", (4096,) * 8, 32, 8, "≥ 80 %"),
        same,
        Point("128 × 1,024, heads 32/8", (1024,) * 128, 32, 8, "≥ 80 %"),
        Point(f"256 × 64…2,048 (mean {sum(contexts) / 256:.0f}), heads 16/8", contexts, 16, 8, "≥ 75 %"),
        Point("16 × 8,192, heads 64/8", (8192,) * 16, 64, 8, "≥ 82 %"),
        Point("16 × 8,192, heads 32/32", (8192,) * 16, 32, 32, "≥ 85 %"),
        replace(same, name="32 × 4,096, heads 32/8, int8 or fp8", goal="≤ 0.60 of bfloat16's time", number_bytes=1.0),
        Point("65,536 and 63 × 512, heads 32/8", (65536, *(512,) * 63), 32, 8, "≥ 70 %"),
    )


def expected_s(point: Point, assumed: Assumptions) -> float:
    """Return the seconds of attention, and of its merge if contexts are cut: waves of programs that load in parallel.

    >>> point = Point("", (1 << 20,) * 64, 32, 8, "")
    >>> round(point.num_bytes / Assumptions().bandwidth / expected_s(point, Assumptions()), 2)
    0.9
    """
    lengths = [
        min(assumed.split_tokens, context - start)
        for context in point.contexts
        for start in range(0, context, assumed.split_tokens)
    ]
    num_programs, slots = len(lengths) * point.num_kv_heads, assumed.num_multiprocessors * assumed.programs_each
    num_busy = min(num_programs, assumed.num_multiprocessors)
    speed = min(
        assumed.full_share * assumed.bandwidth,
        num_busy * assumed.multiprocessor_bandwidth,
        min(num_programs, slots) * assumed.program_bandwidth,
    )
    # Long programs are launched first, so the last wave takes as long as an average one.
    waves = math.ceil(num_programs / slots) * slots / num_programs if num_programs > slots else 1.0
    is_cut = len(lengths) > len(point.contexts)
    partial_bytes = 2 * 4 * len(lengths) * point.num_heads * (HEAD_DIM + 2) if is_cut else 0
    most_parts = math.ceil(max(point.contexts) / assumed.split_tokens) if is_cut else 0
    num_waits = assumed.loads_in_a_row + math.ceil(most_parts / assumed.parts_at_once)
    starts_s = (1 + is_cut) * assumed.launch_s + num_waits * assumed.latency_s
    slowest_s = max(lengths) * point.token_bytes / assumed.program_bandwidth
    return starts_s + max((point.num_bytes * waves + partial_bytes) / speed, slowest_s)


def _attention(assumed: Assumptions) -> Section:
    rows = []
    for point in points():
        bound, expected = point.num_bytes / assumed.bandwidth, expected_s(point, assumed)
        shown = f"{point.num_bytes / 1e6:,.1f}", f"{1e6 * bound:,.1f}", f"{1e6 * expected:,.1f}"
        rows.append((point.name, *shown, f"{100 * bound / expected:.0f} %", point.goal))
    text = (
        "A step of decodes in one layer, head_dim 128, blocks of 16, bfloat16 unless stated. The bound is the bytes "
        "over the bandwidth."
    )
    header = ("sequences × context", "MB", "bound, µs", "expected, µs", "% of the bandwidth", "goal")
    return Section("Decode attention", text, header, rows, {})


def _splits(assumed: Assumptions) -> Section:
    short = [Point(f"1 × {context:,}, heads 16/8", (context,), 16, 8, "") for context in (512, 1024, 2048, 8192)]
    rows = []
    for point in (*short, *points()):
        found = (expected_s(point, replace(assumed, split_tokens=tokens)) for tokens in SPLITS)
        rows.append((point.name, *(f"{1e6 * seconds:,.1f}" for seconds in found)))
    text = (
        "The same steps with other splits. Shorter splits use more multiprocessors for one short context, but write "
        "and merge more parts of a long one. Splits set the order of sums, and so the bits: they have 256 tokens, and "
        "512 in prompts and with batch invariance."
    )
    header = ("sequences × context", *(f"{tokens} tokens, µs" for tokens in SPLITS))
    return Section("Splits of decode attention", text, header, rows, {})


def paged_over(block_size: int, other: float = math.inf) -> float:
    """Return the ratio of a decode's bytes with blocks of one size to those with another size; infinite: no ids.

    >>> round(paged_over(16), 4), round(paged_over(16, 128), 4)
    (1.0005, 1.0004)
    """
    token_bytes = points()[0].token_bytes
    return (token_bytes + 4 / block_size) / (token_bytes + 4 / other)


def invariant_over_fastest(num_sequences: int, context: int) -> float:
    """Return the ratio of bytes of a batch-invariant step of 8B, whose tiles each read the weights, to a normal step.

    >>> round(invariant_over_fastest(128, 1024), 2), round(invariant_over_fastest(256, 1024), 2)
    (1.0, 1.3)
    """
    shape = find_shape("llama-3.1-8b")
    weights = shape.layer_read_bytes("bfloat16", "auto", num_sequences) + shape.head.read_bytes("bfloat16")
    kept = num_sequences * context * shape.kv_bytes_per_token("bfloat16")
    return (kept + math.ceil(num_sequences / INVARIANT_ROWS) * weights) / (kept + weights)


def prompt_share(assumed: Assumptions, context: int) -> float:
    """Return the share of the rate that a prompt's attention reaches if no other operation overlaps with products.

    >>> round(prompt_share(Assumptions(), 4096), 2), round(prompt_share(Assumptions(), 16384), 2)
    (0.45, 0.46)
    """
    products_s = 4 * HEAD_DIM / assumed.rate
    turns = 1 / assumed.exponents_per_turn + assumed.floats_per_score / assumed.floats_per_turn
    rest_s = turns / (assumed.clock * assumed.num_multiprocessors)
    # Tiles on the diagonal waste half of their work.
    needed = context / (context + PROMPT_ROWS)
    return needed * products_s / (products_s / assumed.attention_product_share + rest_s)


def _ratios(assumed: Assumptions) -> Section:
    num_rows, prefix, own = 64, 2048, 128
    plain = Point("", (prefix + own,) * num_rows, 32, 8, "")
    shared_bytes = plain.num_bytes - (num_rows - 1) * prefix * plain.num_kv_heads * plain.token_bytes
    operations = 4 * num_rows * prefix * plain.num_heads * HEAD_DIM
    shared_s = 2 * assumed.launch_s + shared_bytes / (assumed.full_share * assumed.bandwidth)
    shared_s += operations / (assumed.attention_rate_share * assumed.rate)
    named = {point.name: point for point in points()}
    wide, narrow = (named[f"32 × 4,096, heads 32/8{kind}"] for kind in ("", ", int8 or fp8"))
    narrow_s = expected_s(narrow, assumed) / expected_s(wide, assumed)
    bounds = f"{plain.num_bytes / shared_bytes:.1f}×", f"{narrow.num_bytes / wide.num_bytes:.2f}", "1.00"
    found = f"{expected_s(plain, assumed) / shared_s:.1f}×", f"{narrow_s:.2f}", "1.00"
    prompts = [f"{100 * prompt_share(assumed, context):.0f} %" for context in (4096, 16384)]
    alone = f"{100 * assumed.attention_product_share:.0f} %"
    rows = (
        ("paged over contiguous, blocks of 16", f"{paged_over(16):.4f}", f"{paged_over(16):.2f}", "≤ 1.03"),
        ("blocks of 16 over blocks of 128", f"{paged_over(16, 128):.4f}", f"{paged_over(16, 128):.2f}", "≤ 1.02"),
        ("attention of a prompt of 4,096, of the matrix rate", alone, prompts[0], "≥ 55 %"),
        ("attention of a prompt of 16,384, of the matrix rate", alone, prompts[1], "≥ 55 %"),
        ("gain of a shared prefix of 2,048 before 64 × 128", bounds[0], found[0], "≥ 0.70 of the bound"),
        ("time with int8 or fp8, of bfloat16's, 32 × 4,096", bounds[1], found[1], "≤ 0.60"),
        ("time of invariant attention, of the fastest", bounds[2], found[2], "≤ 1.03, its splits are always the same"),
        *(
            (f"time of an invariant step of 8B, {count} × 1,024", "1.00", f"{times:.2f}", "≤ 1.10")
            for count, times in ((count, invariant_over_fastest(count, 1024)) for count in (128, 256))
        ),
    )
    return Section(
        "Paging, prompts, sharing, narrower numbers, invariance",
        RATIOS,
        ("what", "bound", "expected", "goal"),
        rows,
        {},
    )


# ---- end to end -----------------------------------------------------------------------------------------------------


class ExpectedCost:
    """The time of a step: the device's time with kernel launches, or the CPU's time if that is longer."""

    def __init__(self, roofline: Roofline, assumed: Assumptions, host_s: float) -> None:
        hardware = roofline.hardware
        reached = replace(
            hardware,
            read_bandwidth=assumed.product_read_share * hardware.read_bandwidth,
            matrix_rate={name: assumed.product_rate_share * rate for name, rate in hardware.matrix_rate.items()},
        )
        self._cost = RooflineCost(Roofline(reached, roofline.shape, roofline.numbers))
        waits_s = assumed.loads_in_a_row * assumed.latency_s  # of attention
        self._launches_s = roofline.shape.num_layers * (assumed.kernels_per_layer * assumed.launch_s + waits_s)
        self._draw_s = roofline.shape.vocab_size * assumed.draw_bytes / hardware.read_bandwidth
        self._host_s = host_s

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds of a plan."""
        device_s = self._cost.step_s(plan) + self._launches_s + sum(plan.samples) * self._draw_s
        return max(device_s, self._host_s)


def nano_requests() -> list[OfferedRequest]:
    """Return the requests of the nano-vllm benchmark, drawn in the same way.

    >>> requests = nano_requests()
    >>> sum(len(each.prompt) for each in requests), sum(each.num_output_tokens for each in requests)
    (142827, 133966)
    """
    drawn = random.Random(0)
    prompts = [
        array("i", [drawn.randint(0, 10000) for _ in range(drawn.randint(100, 1024))]) for _ in range(NANO_SEQUENCES)
    ]
    return [OfferedRequest(str(i), 0.0, prompt, drawn.randint(100, 1024)) for i, prompt in enumerate(prompts)]


def even_requests(num_tokens: int) -> list[OfferedRequest]:
    """Return 256 requests, each with this many prompt tokens and the same number of output tokens."""
    prompts = (array("i", [number] * num_tokens) for number in range(NANO_SEQUENCES))
    return [OfferedRequest(str(number), 0.0, prompt, num_tokens) for number, prompt in enumerate(prompts)]


@dataclass(frozen=True, slots=True)
class WholeRun:
    """Requests to a model, all at once, with two percentages of their roofline: the goal and the expectation."""

    name: str
    text: str
    model: str
    requests: tuple[OfferedRequest, ...]
    min_share: float
    predicted_share: int | None


def whole_runs() -> tuple[WholeRun, ...]:
    """Return the runs that `quire bench gpu-engine` measures."""
    nano, even = tuple(nano_requests()), tuple(even_requests(1024))
    single, small, large = (replace(even[0], num_output_tokens=SINGLE_TOKENS),), "qwen3-0.6b", "llama-3.1-8b"
    return (
        WholeRun("nano-vllm", "nano-vllm benchmark: 0.6B, 256 sequences", small, nano, 58.0, 66),
        WholeRun("single-0.6b", "0.6B, one sequence of 1,024 and 512", small, single, 40.0, 27),
        WholeRun("256x1k-1k", "8B, 256 × 1,024 and 1,024", large, even, 65.0, 70),
        WholeRun("single-8b", "8B, one sequence of 1,024 and 512", large, single, 70.0, 67),
    )


def ceilings(bandwidth: float, rate: float) -> Hardware:
    """Return hardware that only reads and multiplies, at these rates."""
    vendor = find_hardware("nvidia-h200")
    rates = {**vendor.matrix_rate, "bfloat16": rate}
    return replace(vendor, read_bandwidth=bandwidth, matrix_rate=rates, step_overhead_s=0.0)


def bound_s(requests: list[OfferedRequest], shape: ModelShape, hardware: Hardware) -> float:
    """Return the roofline time of requests: the real scheduler, with steps as fast as the hardware allows."""
    return _served_s(requests, shape, RooflineCost(Roofline(hardware, shape, Numbers())))


def _served_s(requests: list[OfferedRequest], shape: ModelShape, cost: RooflineCost | ExpectedCost) -> float:
    """Return the seconds that the requests take."""
    spec = shape.kv_cache_spec(16, "bfloat16")
    needed = sum((len(request.prompt) + request.num_output_tokens) // spec.block_size + 2 for request in requests)
    num_blocks = min(2 * needed, 100_000_000_000 // spec.bytes_per_block)
    memory = MemoryConfig(num_blocks=num_blocks, prefix_index="none")
    setup = EngineSetup(spec, memory, SchedulerConfig(256, 16384, 4096), cost)
    return Simulation([PagedEngine(setup)], OpenLoop(requests)).run().duration_s


def _engine(assumed: Assumptions, hardware: Hardware, tell: Tell) -> Section:
    rows: list[tuple[str, ...]] = []

    for run in whole_runs():
        tell(run.text)
        shape, requests = find_shape(run.model), list(run.requests)
        roofline = Roofline(hardware, shape, Numbers())
        costs = (ExpectedCost(roofline, assumed, host_s) for host_s in _hosts(shape, assumed))
        found = [_served_s(requests, shape, cost) for cost in costs]
        bound = bound_s(requests, shape, hardware)
        shares = [f"{seconds:.2f} s, {100 * bound / seconds:.0f} %" for seconds in found]
        rows.append((run.text, f"{bound:.2f} s", *shares, f"≥ {run.min_share:.0f} %"))
    rows.append(_unhidden(hardware, assumed))
    text = (
        "Whole runs by the real scheduler on a virtual clock, all requests at once, at most 256 sequences and 16,384 "
        "tokens in a step. The bound is the roofline of the same steps. With graphs and a step ahead, the CPU's work "
        "costs nothing unless it takes longer than the device's; launched one by one, every kernel adds its launch. "
        "The performance of transformers is measured in the same run, not predicted."
    )
    header = ("what", "bound", "expected with graphs", "expected, launched one by one", "goal")
    return Section("Whole engine", text, header, rows, {})


def _unhidden(hardware: Hardware, assumed: Assumptions) -> tuple[str, ...]:
    """Return the share of a step of 256 decodes in which only the CPU works: none with a step ahead, all without."""
    roofline = Roofline(hardware, find_shape("qwen3-0.6b"), Numbers())
    ones = array("i", [1] * 256)
    plan = StepPlan(0, array("i", range(256)), array("i", [800] * 256), ones, array("b", [1] * 256))
    device_s = ExpectedCost(roofline, assumed, 0.0).step_s(plan)
    behind = [f"{100 * host_s / (device_s + host_s):.0f} %" for host_s in _hosts(roofline.shape, assumed)]
    ahead = [
        f"{100 * max(0.0, host_s - device_s) / max(host_s, device_s):.0f} %"
        for host_s in _hosts(roofline.shape, assumed)
    ]
    shown = [f"{one} a step ahead, else {other}" for one, other in zip(ahead, behind, strict=True)]
    return "0.6B, 256 sequences: of a step, the processor's alone", "0 %", *shown, "≤ 5 %"


def _hosts(shape: ModelShape, assumed: Assumptions) -> tuple[float, float]:
    """Return the CPU's seconds in a step: with graphs, and with separate launches."""
    launches_s = shape.num_layers * assumed.kernels_per_layer * assumed.eager_launch_s
    return assumed.host_s, assumed.host_s + launches_s


DESCRIPTION = (
    "Predict the performance of attention and whole engines on an H200, from bytes, operations and assumptions. "
    "Measures nothing, and needs no GPU."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare no flags: predictions have none."""


def run(options: argparse.Namespace) -> int:
    """Predict, print, and write the requested files; returns the exit status."""
    assumed = Assumptions()
    hardware = ceilings(assumed.bandwidth, assumed.rate)

    def predict(tell: Tell) -> Iterator[Section]:
        rows = [(field.name.replace("_", " "), f"{getattr(assumed, field.name):g}") for field in fields(assumed)]
        text = (
            "**Predictions, not measurements**, revised when the first run below was known, after a review of the "
            "compiled code. It expects 66 to 72 % for decode attention of 1 × 32,768, 42 to 50 % for attention of "
            "prompts, 58 to 66 % for nano-vllm, 67 to 74 % for 8B. Percentages are of the ceilings of the same device. "
            "Each assumption is explained in src/quire/instruments/bench/gpu_predictions.py."
        )
        yield Section("Assumed of an H200", text, ("what", "value"), rows, {})
        yield _attention(assumed)
        yield _splits(assumed)
        yield _ratios(assumed)
        yield _engine(assumed, hardware, tell)

    return run_benchmark(options, "GPU: predictions", predict, timed=False)
