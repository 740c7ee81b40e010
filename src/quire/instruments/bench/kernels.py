"""`quire bench kernels`: the loops of a step alone, compared with the limits of the machine.

As in a step, the data exceeds the caches: products use many copies of a matrix, attention many layers. A time is the
median of several calls. Bandwidth and arithmetic are measured again before each measurement that is compared with them.
Measurements that are compared with each other take turns.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.cli.machine_limits import MachineLimits
from quire.compute.weights.codes import CODINGS, INNER, MADE, coded_row_bytes, in_groups
from quire.core.granted import usable_cores
from quire.instruments.bench.attention_layout import CONTIGUOUS, IN_ORDER, SHUFFLED, PagedLayers
from quire.instruments.bench.flags import SHAPES, add_choices, add_count, add_counts, add_size, count, decode_load
from quire.instruments.bench.shapes import HEAD, KernelShape, Matrix, kernel_shape
from quire.instruments.bench.thread_counts import Seconds, compare_threads
from quire.reporting.report import Goal, Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import ratios, summarize

MIN_CALLS = 3
MAX_CALLS = 200
SECONDS_PER_RUN = 0.5
ATTENTION_PASSES = 10

MIN_READ_SHARE = {rows: 88.0 for rows in (1, 2, 4, 8, 16, 32)} | {64: 75.0}
MIN_ARITHMETIC_SHARE = 60.0
MIN_ATTENTION_SHARE = 80.0
MAX_PAGED = {16: 1.03, 32: 1.01, 64: 1.01, 128: 1.01}
INT8_BLOCK, INT8_GOAL_TOKENS, MAX_INT8 = 16, 4096, 0.62
PROMPT_BLOCK, PROMPT_BYTES, MIN_PROMPT_SHARE = 16, 64 << 20, 70.0
MAX_HEAD_ROWS = 64
"""Steps with more rows are prompts, and only the last token of a prompt needs the head."""

STEP = "all of a step"
BFLOAT16: Final = "bfloat16"
CODES: Final = ("int8", "int4", *(kind for kind in CODINGS if kind not in (*MADE, "Q6_K_wide", "E4M3")))
"""Codes that the compiled core has: made from floats, and types of blocks."""
NAMES: Final = MappingProxyType({BFLOAT16: "", "int8": "int8_groups"})
"""Types of weights that have other names in the compiled core."""
GOAL_BYTES = 256 << 20
"""A smaller working set fits into caches, so it has no goals."""


@dataclass(frozen=True, slots=True)
class ProductRun:
    """Products with one matrix, or of a whole step: median seconds, and the machine's limits measured right before."""

    seconds: float
    num_bytes: int
    num_operations: int
    bandwidth: float
    arithmetic: float | None

    @property
    def read_share(self) -> float:
        """Percent of the bandwidth."""
        return 100 * self.num_bytes / self.seconds / self.bandwidth

    @property
    def arithmetic_share(self) -> float | None:
        """Percent of the arithmetic."""
        return None if self.arithmetic is None else 100 * self.num_operations / self.seconds / self.arithmetic

    @property
    def bound_share(self) -> float:
        """Percent of the nearer bound: the greater of the two shares."""
        return max(self.read_share, self.arithmetic_share or 0.0)


def together(runs: Sequence[tuple[int, ProductRun]]) -> ProductRun:
    """Return several repeated products as one, whose bound is the sum of their bounds."""
    num_bytes = sum(count * run.num_bytes for count, run in runs)
    num_operations = sum(count * run.num_operations for count, run in runs)
    rates = [(count * run.num_operations, run.arithmetic) for count, run in runs if run.arithmetic is not None]
    return ProductRun(
        seconds=sum(count * run.seconds for count, run in runs),
        num_bytes=num_bytes,
        num_operations=num_operations,
        bandwidth=num_bytes / sum(count * run.num_bytes / run.bandwidth for count, run in runs),
        arithmetic=num_operations / sum(done / rate for done, rate in rates) if rates else None,
    )


PARTS = ("limits", "products", "codes", "attention")
DESCRIPTION = (
    "Measure the machine's memory bandwidth and arithmetic, and compare matrix products and paged attention with "
    "them. Needs no model."
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of this benchmark. Mutates the parser."""
    add_choices(parser, "only", PARTS, PARTS, "measure only these parts")
    parser.add_argument(
        "--shape",
        metavar="NAME",
        nargs="+",
        default=SHAPES[:2],
        help=f"models whose matrices and heads to use: {', '.join(SHAPES)}, or a model folder; default: "
        f"{' '.join(SHAPES[:2])}",
    )
    add_counts(parser, "rows", (1, 2, 4, 8, 16, 32, 64, 256, 512, 2048), "rows per matrix product")
    add_choices(parser, "codes", CODES, CODES[:2], "weights as codes")
    add_counts(parser, "block-sizes", (16, 32, 64, 128), "tokens per block in attention")
    parser.add_argument(
        "--decodes",
        metavar="NxTOKENS",
        nargs="+",
        type=decode_load,
        default=((1, 8192), (8, 2048), (32, 512)),
        help="sequences x tokens in attention; default: 1x8192 8x2048 32x512",
    )
    add_counts(parser, "prompts", (512, 1024, 2048, 4096), "tokens of a prompt in attention")
    add_count(parser, "repeat", 5, "repetitions of each measurement")
    parser.add_argument(
        "--threads",
        metavar="N",
        type=count,
        nargs="+",
        default=(usable_cores(),),
        help="threads; with several numbers, everything is measured with each, and the times are compared; "
        "default: one per core that this process may use",
    )
    add_size(parser, "read-size", "1GiB", "amount of memory to read when measuring bandwidth")
    add_size(parser, "working-set", "512MiB", "memory to cycle through; must be larger than the caches")


def run(options: argparse.Namespace) -> int:
    """Measure, print, and write the requested files; returns the exit status."""
    shapes = [kernel_shape(name) for name in options.shape]

    def measure(tell: Tell) -> Iterator[Section]:
        seconds: dict[int, Seconds] = {}
        for num_threads in options.threads:
            bench = KernelBench(MachineLimits(num_threads, options.read_size), options, tell)
            if "limits" in options.only and not seconds:
                yield bench.measure_limits()
            for section in bench.measure_shapes(shapes):
                team = "1 thread" if num_threads == 1 else f"{num_threads} threads"
                yield section if len(options.threads) == 1 else replace(section, title=f"{section.title}, {team}")
            seconds[num_threads] = bench.seconds
        if len(seconds) > 1:
            yield compare_threads(seconds)

    return run_benchmark(options, "Kernels", measure)


class KernelBench:
    """Measures kernels; `options` are those of the command."""

    def __init__(self, limits: MachineLimits, options: argparse.Namespace, tell: Tell) -> None:
        self._limits = limits
        self._options = options
        self._tell = tell
        self._repeat: int = options.repeat
        self.seconds: Seconds = {}

    def measure_shapes(self, shapes: Sequence[KernelShape]) -> Iterator[Section]:
        """Measure the requested parts of every shape."""
        for shape in shapes:
            if "products" in self._options.only:
                yield self.measure_products(shape)
            if "codes" in self._options.only:
                yield self.measure_codes(shape)
            if "attention" in self._options.only:
                yield self.measure_attention(shape)
                yield self.measure_int8_attention(shape)
                yield self.measure_prompt_attention(shape)

    # ---- limits -----------------------------------------------------------------------------------------------

    def measure_limits(self) -> Section:
        """Measure the limits of the machine with one thread and with each number of threads."""
        options = self._options
        found: dict[int, tuple[list[float], list[float]]] = {}
        teams = {n: MachineLimits(n, options.read_size) for n in (1, *options.threads)}
        for index in range(self._repeat):
            self._tell(f"limits: run {index + 1} of {self._repeat}")
            for size, limits in teams.items():
                bandwidth, arithmetic = found.setdefault(size, ([], []))
                bandwidth.append(limits.bandwidth() / 1e9)
                arithmetic.append((limits.arithmetic() or 0.0) / 1e9)
        rows = [
            (str(size), cell(summarize(bandwidth)), cell(summarize(arithmetic)) if all(arithmetic) else "not known")
            for size, (bandwidth, arithmetic) in found.items()
        ]
        text = (
            f"Reading {options.read_size / 2**20:,.0f} MiB, and {self._limits.kernels.name} multiplying and adding on "
            f"registers. Median of {self._repeat} runs (min–max), the best pass of each."
        )
        samples: dict[str, object] = {
            f"{size} threads": {"read_gb_s": bandwidth, "gflop_s": arithmetic}
            for size, (bandwidth, arithmetic) in found.items()
        }
        return Section("Limits of the machine", text, ("threads", "read, GB/s", "GFLOP/s"), rows, samples)

    # ---- products ---------------------------------------------------------------------------------------------

    def measure_products(self, shape: KernelShape) -> Section:
        """Measure the products of a model's matrices with 1 row and more."""
        runs: dict[tuple[str, int], list[ProductRun]] = {}
        for name, matrix in shape.matrices.items():
            self._tell(f"products of {shape.name}: {name}")
            found = self._products(matrix, (BFLOAT16,))
            runs |= {(name, num_rows): found[BFLOAT16, num_rows] for num_rows in self._options.rows}
        steps = {num_rows: self._steps(shape, runs, num_rows) for num_rows in self._options.rows}
        runs |= {(STEP, num_rows): found for num_rows, found in steps.items()}
        for num_rows, own in steps.items():
            self.seconds[f"{shape.name}, products of {num_rows} rows"] = [run.seconds for run in own]
        rows = [self._product_row(matrix, num_rows, found) for (matrix, num_rows), found in runs.items()]
        text = (
            f"{self._limits.kernels.name}, bfloat16 weights, {self._limits.team.size} threads; copies of each matrix "
            f"in turn, {self._options.working_set / 2**20:,.0f} MiB in total. Median of {self._repeat} runs (min–max). "
            f"“{STEP}”: every matrix as often as a step needs it, the head up to {MAX_HEAD_ROWS} rows."
        )
        header = (
            "matrix",
            "rows",
            "ms",
            "GB/s",
            "% of the bandwidth",
            "GFLOP/s",
            "% of the arithmetic",
            "% of the bound",
        )
        samples: dict[str, object] = {
            f"{matrix}, {n} rows": [asdict(run) for run in f] for (matrix, n), f in runs.items()
        }
        goals = [goal for num_rows, found in steps.items() for goal in self._product_goals(shape, num_rows, found)]
        return Section(f"Products: {shape.name}", text, header, rows, samples, goals)

    def _steps(
        self, shape: KernelShape, runs: dict[tuple[str, int], list[ProductRun]], num_rows: int
    ) -> list[ProductRun]:
        """Return the products of a whole step, one entry per run."""
        found = [
            (matrix.count, runs[name, num_rows])
            for name, matrix in shape.matrices.items()
            if name != HEAD or num_rows <= MAX_HEAD_ROWS
        ]
        return [together([(count, each[index]) for count, each in found]) for index in range(self._repeat)]

    def _products(self, matrix: Matrix, kinds: Sequence[str]) -> dict[tuple[str, int], list[ProductRun]]:
        """Measure products with a matrix stored as each of `kinds`, in turn, for each number of rows."""
        from quire._benchmarks import ProductBenchmark

        limits, num_outputs, num_inputs = self._limits, matrix.num_outputs, matrix.num_inputs
        num_copies = max(1, -(-self._options.working_set // (2 * num_outputs * num_inputs)))
        # 0.0078 in bfloat16; any normal number works.
        rows = np.full((num_outputs, num_inputs), 0x3C00, np.uint16)
        products = {
            kind: ProductBenchmark(limits.kernels, limits.team, rows, num_copies, codes=NAMES.get(kind, kind))
            for kind in kinds
        }
        runs: dict[tuple[str, int], list[ProductRun]] = {}
        for _, num_rows, kind in itertools.product(range(self._repeat), self._options.rows, kinds):
            product = products[kind]
            bandwidth, arithmetic = limits.bandwidth(), limits.arithmetic()
            first = product.run(num_rows, 1)[0]
            num_calls = min(max(round(SECONDS_PER_RUN / max(first, 1e-9)), MIN_CALLS), MAX_CALLS)
            seconds = summarize(product.run(num_rows, num_calls)).median
            operations = 2 * num_rows * num_outputs * num_inputs
            run = ProductRun(seconds, product.num_bytes, operations, bandwidth, arithmetic)
            runs.setdefault((kind, num_rows), []).append(run)
        return runs

    def measure_codes(self, shape: KernelShape) -> Section:
        """Measure the products of a whole step with weights as codes, in turn with bfloat16."""
        found: dict[str, dict[tuple[str, int], list[ProductRun]]] = {}
        kinds = (BFLOAT16, *self._options.codes)
        for name, matrix in shape.matrices.items():
            self._tell(f"products with codes of {shape.name}: {name}")
            found[name] = self._products(matrix, kinds)
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        for num_rows, kind in itertools.product(self._options.rows, kinds):
            own, wide = (
                self._steps(shape, {(name, num_rows): runs[which, num_rows] for name, runs in found.items()}, num_rows)
                for which in (kind, BFLOAT16)
            )
            samples[f"{kind}, {num_rows} rows"] = [asdict(run) for run in own]
            self.seconds[f"{shape.name}, {kind} products of {num_rows} rows"] = [run.seconds for run in own]
            rows.append(
                (
                    str(num_rows),
                    kind,
                    cell(summarize([1e3 * run.seconds for run in own])),
                    cell(summarize([run.num_bytes / run.seconds / 1e9 for run in own])),
                    cell(summarize([run.read_share for run in own])),
                    cell(summarize([run.num_operations / run.seconds / 1e9 for run in own])),
                    cell(summarize(ratios([run.seconds for run in own], [run.seconds for run in wide]))),
                )
            )
        bits = {kind: 8 * coded_row_bytes(in_groups(kind), INNER) / INNER for kind in self._options.codes}
        types = ", ".join((BFLOAT16, *(f"{kind} with {each:g} bits for each weight" for kind, each in bits.items())))
        text = (
            f"{self._limits.kernels.name}, {self._limits.team.size} threads; every matrix as often as a step needs it, "
            f"weights of each type in turn: {types}. Median of {self._repeat} runs (min–max); the ratio is taken "
            "within each run."
        )
        header = ("rows", "weights", "ms", "GB/s", "% of the bandwidth", "GOP/s", "time to bfloat16's")
        return Section(f"Products with codes: {shape.name}", text, header, rows, samples)

    def _product_row(self, matrix: str, num_rows: int, runs: list[ProductRun]) -> tuple[str, ...]:
        shares = [run.arithmetic_share for run in runs if run.arithmetic_share is not None]
        return (
            matrix,
            str(num_rows),
            cell(summarize([1e3 * run.seconds for run in runs])),
            cell(summarize([run.num_bytes / run.seconds / 1e9 for run in runs])),
            cell(summarize([run.read_share for run in runs])),
            cell(summarize([run.num_operations / run.seconds / 1e9 for run in runs])),
            cell(summarize(shares) if shares else None),
            cell(summarize([run.bound_share for run in runs])),
        )

    def _product_goals(self, shape: KernelShape, num_rows: int, runs: list[ProductRun]) -> list[Goal]:
        if self._options.working_set < GOAL_BYTES:
            return []
        what = f"{shape.name}, products of {num_rows} rows"
        if num_rows in MIN_READ_SHARE:
            share = summarize([run.read_share for run in runs]).median
            return [Goal(f"{what}: % of the bandwidth", share, MIN_READ_SHARE[num_rows], at_least=True)]
        shares = [run.arithmetic_share for run in runs if run.arithmetic_share is not None]
        if num_rows < 256 or not shares:
            return []
        share = summarize(shares).median
        return [Goal(f"{what}: % of the arithmetic", share, MIN_ARITHMETIC_SHARE, at_least=True)]

    # ---- attention --------------------------------------------------------------------------------------------

    def measure_attention(self, shape: KernelShape) -> Section:
        """Measure steps of decodes over shuffled blocks and over contiguous memory, for every block size."""
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        for num_sequences, num_tokens in self._options.decodes:
            self._tell(f"attention of {shape.name}: {num_sequences} × {num_tokens}")
            for block_size in self._options.block_sizes:
                found = self._attention(shape, num_sequences, num_tokens, block_size)
                what = f"{num_sequences} × {num_tokens:,}"
                shuffled_s = found.seconds[SHUFFLED]
                paged = summarize(ratios(shuffled_s, found.seconds[CONTIGUOUS]))
                speeds = [found.num_bytes / seconds / 1e9 for seconds in shuffled_s]
                shares = [100 * 1e9 * s / bandwidth for s, bandwidth in zip(speeds, found.bandwidth, strict=True)]
                rows.append(
                    (
                        what,
                        str(block_size),
                        cell(summarize([1e3 * seconds / found.num_layers for seconds in shuffled_s])),
                        cell(summarize(speeds)),
                        cell(summarize(shares)),
                        cell(summarize(ratios(shuffled_s, found.seconds[IN_ORDER]))),
                        cell(paged),
                    )
                )
                samples[f"{what}, blocks of {block_size}"] = asdict(found)
                self.seconds[f"{shape.name}, decode of {what}, blocks of {block_size}"] = shuffled_s
                if self._options.working_set >= GOAL_BYTES:
                    label = f"{shape.name}, {what}, blocks of {block_size}"
                    goals += _attention_goals(label, block_size, summarize(shares).median, paged.median)
        text = (
            f"{shape.num_heads} heads over {shape.num_kv_heads}, head_dim {shape.head_dim}, bfloat16, a decode of "
            f"every sequence; times of one layer, blocks shuffled. Median of {self._repeat} runs (min–max). For the "
            f"ratios, the same kernel reads the same memory with blocks in order, and with each sequence contiguous; "
            f"{ATTENTION_PASSES} passes each, in turn."
        )
        header = ("decodes", "block", "ms", "GB/s", "% of the bandwidth", "to in order", "to contiguous")
        return Section(f"Paged attention: {shape.name}", text, header, rows, samples, goals)

    def _attention(self, shape: KernelShape, num_sequences: int, num_tokens: int, block_size: int) -> AttentionRuns:
        limits = self._limits
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        layers = PagedLayers(
            heads, (num_sequences, num_tokens), block_size=block_size, num_bytes=self._options.working_set
        )
        runs = AttentionRuns(layers.num_layers, layers.num_bytes, [], {name: [] for name in layers.layouts})
        for _ in range(self._repeat):
            runs.bandwidth.append(limits.bandwidth())
            passes: dict[str, list[float]] = {name: [] for name in layers.layouts}
            for index in range(ATTENTION_PASSES):
                names = list(layers.layouts)
                for name in names if index % 2 else reversed(names):
                    passes[name].append(layers.attend(limits.kernels, limits.team, layers.layouts[name]))
            for name, seconds in passes.items():
                runs.seconds[name].append(summarize(seconds).median)
        return runs

    def measure_int8_attention(self, shape: KernelShape) -> Section:
        """Measure the longer decodes over keys and values of int8 and of bfloat16, in turn."""
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        size = self._options.working_set
        for decodes in self._options.decodes:
            what = f"{decodes[0]} × {decodes[1]:,}"
            self._tell(f"attention of {shape.name} with int8: {what}")
            layers = {
                dtype: PagedLayers(heads, decodes, block_size=INT8_BLOCK, num_bytes=size, dtype=dtype)
                for dtype in ("bfloat16", "int8")
            }
            found: dict[str, list[float]] = {dtype: [] for dtype in layers}
            for _ in range(self._repeat):
                passes: dict[str, list[float]] = {dtype: [] for dtype in layers}
                for index in range(ATTENTION_PASSES):
                    for dtype in layers if index % 2 else reversed(layers):
                        each = layers[dtype]
                        seconds = each.attend(self._limits.kernels, self._limits.team, each.layouts[SHUFFLED])
                        passes[dtype].append(seconds / each.num_layers)
                for dtype, times in passes.items():
                    found[dtype].append(summarize(times).median)
            share = summarize(ratios(found["int8"], found["bfloat16"]))
            rows.append((what, *(cell(summarize([1e3 * s for s in found[dtype]])) for dtype in layers), cell(share)))
            samples[what] = found
            if size >= GOAL_BYTES and decodes[1] >= INT8_GOAL_TOKENS:
                goals.append(Goal(f"{shape.name}, {what}: int8 to bfloat16", share.median, MAX_INT8))
        text = (
            f"Decodes over shuffled blocks of {INT8_BLOCK} tokens, keys and values of int8 in turn with those of "
            f"bfloat16; times of one layer. Median of {self._repeat} runs (min–max)."
        )
        header = ("decodes", "bfloat16, ms", "int8, ms", "int8 to bfloat16")
        return Section(f"Attention with int8: {shape.name}", text, header, rows, samples, goals)

    def measure_prompt_attention(self, shape: KernelShape) -> Section:
        """Measure attention of whole prompts, in which many rows use the same keys and values."""
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        goals: list[Goal] = []
        limits, heads = self._limits, (shape.num_heads, shape.num_kv_heads, shape.head_dim)
        size = min(self._options.working_set, PROMPT_BYTES)
        for num_tokens in self._options.prompts:
            self._tell(f"attention of {shape.name}: a prompt of {num_tokens}")
            layers = PagedLayers(heads, (1, num_tokens), block_size=PROMPT_BLOCK, num_bytes=size)
            # Scores and sums of values: two operations for each of the tokens up to a token's own.
            operations = 2 * shape.num_heads * shape.head_dim * num_tokens * (num_tokens + 1)
            times, rates, shares = [], [], []
            for _ in range(self._repeat):
                rate = limits.arithmetic()
                seconds = layers.attend(limits.kernels, limits.team, layers.layouts[SHUFFLED], num_tokens)
                times.append(seconds / layers.num_layers)
                rates.append(operations / times[-1] / 1e9)
                if rate is not None:
                    shares.append(100e9 * rates[-1] / rate)
            what = f"{num_tokens:,}"
            share = cell(summarize(shares)) if shares else "–"
            rows.append((what, cell(summarize([1e3 * s for s in times])), cell(summarize(rates)), share))
            samples[what] = {"rates": rates, "shares": shares}
            self.seconds[f"{shape.name}, attention of a prompt of {what}"] = times
            if shares and size == PROMPT_BYTES:
                label = f"{shape.name}, attention of a prompt of {what}: % of the arithmetic"
                goals.append(Goal(label, summarize(shares).median, MIN_PROMPT_SHARE, at_least=True))
        text = (
            f"{shape.num_heads} heads over {shape.num_kv_heads}, head_dim {shape.head_dim}, bfloat16, a whole prompt "
            f"at once over shuffled blocks of {PROMPT_BLOCK}; times of one layer. Only scores up to a token's own "
            f"position count as work. Median of {self._repeat} runs (min–max)."
        )
        header = ("tokens", "ms", "GFLOP/s", "% of the arithmetic")
        return Section(f"Attention of prompts: {shape.name}", text, header, rows, samples, goals)


@dataclass(frozen=True, slots=True)
class AttentionRuns:
    """Seconds of attention over all layers, by the name of the layout, one entry per run."""

    num_layers: int
    num_bytes: int
    bandwidth: list[float]
    seconds: dict[str, list[float]]


def _attention_goals(label: str, block_size: int, share: float, paged: float) -> list[Goal]:
    return [
        Goal(f"{label}: % of the bandwidth", share, MIN_ATTENTION_SHARE, at_least=True),
        Goal(f"{label}: paged to contiguous", paged, MAX_PAGED.get(block_size, 1.01)),
    ]
