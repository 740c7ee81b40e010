"""`quire bench`: measurements. Each benchmark is a module with `DESCRIPTION`, `add_options(parser)` and `run(options)`.

A module is imported when its benchmark is named, so that `quire bench --help` answers at once.
"""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any, NamedTuple

from quire.cli import OneLineParser
from quire.instruments.bench.flags import add_output_options


class Benchmark(NamedTuple):
    """A benchmark, and the module that knows it."""

    name: str
    module: str
    help: str


BENCHMARKS = (
    Benchmark("throughput", "throughput", "whole workloads"),
    Benchmark("latency", "latency", "single steps and prompts, beside their bounds"),
    Benchmark("startup", "startup", "first token, load and installation"),
    Benchmark("memory", "memory_use", "where the memory goes, planned and held"),
    Benchmark("kernels", "kernels", "products and attention, beside the machine's limits"),
    Benchmark("gpu-engine", "gpu_engine", "whole runs on a GPU, beside their roofline"),
    Benchmark("gpu-predictions", "gpu_predictions", "what a GPU should reach, by bytes"),
    Benchmark("quality", "quality", "what narrower numbers do to what a model says"),
    Benchmark("sharing", "sharing", "blocks saved by several texts of one prompt"),
    Benchmark("fairness", "fairness", "what fair share gives to tenants who ask differently"),
    Benchmark("record", "record", "steps, and a cost model fitted to them"),
    Benchmark("serve", "serve", "a server under load, and what 'HTTP' costs"),
    Benchmark("structured", "structured", "what holding texts to a schema costs"),
    Benchmark("simulator", "simulated", "how fast simulations run, and in how much memory"),
    Benchmark("control", "control", "the control plane, beside vLLM's, where it is there"),
)


class BenchmarkParser(OneLineParser):
    """Asks the module of its benchmark for the flags, when there is something to parse."""

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
    """Declare `quire bench` and what can be measured. Mutates `subparsers`."""
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
