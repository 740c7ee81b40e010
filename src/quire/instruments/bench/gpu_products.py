"""Products of a step by torch's own library, for `quire bench gpu-kernels`: the part of a step that is not quire's.

Every matrix of a model is measured alone, in a graph over more copies than the caches hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Final

from quire.cli.model_shapes import find_settings
from quire.compute.models import read_model
from quire.instruments.bench.shapes import KernelShape, Matrix, kernel_shape
from quire.reporting.report import Section, cell
from quire.reporting.samples import summarize

if TYPE_CHECKING:
    from quire.instruments.bench.gpu_attention import GpuKernelBench

MODELS: Final = ("qwen3-0.6b", "llama-3.1-8b")
NUMBER_BYTES: Final = 2


def measure_products(bench: GpuKernelBench) -> Iterator[Section]:
    """Measure the products of models, compared with the nearer limit; yields a longer section after every matrix."""
    options = bench.options
    header = ("matrix", "rows", "µs", "% of the bandwidth", "% of the matrix rate", "in a step")
    text = (
        f"{bench.limits.name}; the library's product alone, median of {options.repeat} runs (min–max) of a graph over "
        "copies of the matrix. The bandwidth counts only the weights."
    )
    for name in ("tiny",) if options.small else MODELS:
        shape = kernel_shape(name) if options.small else KernelShape.of(name, read_model(find_settings(name)).spec)
        rows: list[tuple[str, ...]] = []
        samples: dict[str, object] = {}
        for part, matrix in shape.matrices.items():
            bandwidth, rate = bench.limits.bandwidth(), bench.limits.arithmetic() or float("inf")
            for count in options.rows:
                point = f"products of {name}: {part}, {count} rows"
                found, why = bench.tried(point, partial(_seconds, bench, matrix, count))
                if found is None:
                    rows.append((part, str(count), why, "–", "–", f"× {matrix.count}"))
                    continue
                size = matrix.num_outputs * matrix.num_inputs
                read = [100 * NUMBER_BYTES * size / second / bandwidth for second in found]
                done = [100 * 2 * size * count / second / rate for second in found]
                columns = (cell(summarize(each)) for each in ([1e6 * second for second in found], read, done))
                rows.append((part, str(count), *columns, f"× {matrix.count}"))
                samples[f"{part}, {count} rows"] = {"seconds": found, "bandwidth": bandwidth, "rate": rate}
            yield Section(f"Products of the library: {name}", text, header, rows, samples)


def _seconds(bench: GpuKernelBench, matrix: Matrix, count: int) -> list[float]:
    """Return the seconds of one product in each run."""
    from quire.compute.torch.limits import product_seconds

    options, size = bench.options, (count, matrix.num_outputs, matrix.num_inputs)
    measure = product_seconds(options.device, "float32" if options.small else "bfloat16", size, options.working_set)
    return [measure() for _ in range(options.repeat)]
