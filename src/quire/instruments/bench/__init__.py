"""`quire bench`: measurements. Each benchmark is a module with `DESCRIPTION`, `add_options(parser)` and `run(options)`.

A module is imported only if its benchmark is named, so that `quire bench --help` answers at once.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, NamedTuple

from quire.cli import OneLineParser
from quire.instruments.bench.flags import add_output_options


class Benchmark(NamedTuple):
    """A benchmark and its module."""

    name: str
    module: str
    help: str


BENCHMARKS = (
    Benchmark("throughput", "throughput", "whole workloads"),
    Benchmark("latency", "latency", "single steps and prompts, compared with their bounds"),
    Benchmark("startup", "startup", "first token, load and installation"),
    Benchmark("memory", "memory_use", "memory use, planned and actual"),
    Benchmark("kernels", "kernels", "matrix products and attention, compared with the machine's limits"),
    Benchmark("gpu-kernels", "gpu_kernels", "attention and products on a GPU, compared with its limits"),
    Benchmark("gpu-engine", "gpu_engine", "whole runs on a GPU, compared with the roofline"),
    Benchmark("gpu-predictions", "gpu_predictions", "expected GPU performance, estimated from bytes"),
    Benchmark("quality", "quality", "how narrower number types change a model's output"),
    Benchmark("sharing", "sharing", "blocks saved by sampling several texts from one prompt"),
    Benchmark("fairness", "fairness", "shares that fair_share gives tenants with different traffic"),
    Benchmark("record", "record", "record steps and fit a cost model"),
    Benchmark("serve", "serve", "a server under load, and the cost of HTTP"),
    Benchmark("disk", "disk", "time to first token with a disk cache, and the cost of the cache"),
    Benchmark("vectors", "vectors", "speed of embeddings, and of a reranker with the prefix cache"),
    Benchmark("images", "images", "the time of encoding images, and of texts meanwhile"),
    Benchmark("adapters", "adapters", "steps whose rows have adapters"),
    Benchmark("replicas", "replicas", "several engines behind a server: losses when one fails, and speed"),
    Benchmark("speculation", "speculation", "speed with guessed tokens, and whether texts stay the same"),
    Benchmark("structured", "structured", "cost of structured output"),
    Benchmark("simulator", "simulated", "speed and memory of simulations"),
    Benchmark("control", "control", "the control plane, compared with vLLM's if it is installed"),
)


class BenchmarkParser(OneLineParser):
    """Imports the module of its benchmark, which declares the flags, only when it parses arguments."""

    def __init__(self, *, module: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._module = module
        self._has_flags = False

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Declare the flags, then parse. Mutates."""
        if not self._has_flags:
            self._has_flags = True
            module = import_module(f"{__name__}.{self._module}")
            self.description = module.DESCRIPTION
            module.add_options(self)
            add_output_options(self)
            self.set_defaults(run=module.run)
        return super().parse_known_args(args, namespace)


def add_parser(subparsers: Any) -> None:
    """Declare `quire bench` and its benchmarks. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "bench", help="measure quire", description="Measure a part of quire on this machine."
    )
    parser.set_defaults(run=lambda _: _show_help(parser))
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", parser_class=BenchmarkParser)
    for benchmark in BENCHMARKS:
        benchmarks.add_parser(benchmark.name, help=benchmark.help, module=benchmark.module)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2
