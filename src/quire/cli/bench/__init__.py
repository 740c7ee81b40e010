"""`quire bench`: measurements. This file only declares them; what they need is imported when one is run."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib import import_module
from typing import Any

from quire.cli.engine_options import add_engine_options
from quire.core.byte_sizes import parse_bytes
from quire.core.errors import InvalidConfigError

PARTS = ("decode", "growth", "prefix", "pool", "caching")
KERNEL_PARTS = ("limits", "products", "attention")
SERVE_PARTS = ("load", "http", "live")
GPU_MODELS = ("qwen3-0.6b", "llama-3.1-8b")
SHAPES = ("qwen3-0.6b", "llama-3.2-1b", "tiny")


def add_parser(subparsers: Any) -> None:
    """Declare `quire bench` and what can be measured. Mutates `subparsers`."""
    parser = subparsers.add_parser(
        "bench", help="measure quire", description="Measure a part of quire on this machine."
    )
    parser.set_defaults(run=lambda _: _show_help(parser))
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK")
    for name, add_options, module, text, description in (
        ("throughput", _add_throughput_options, "throughput", "whole workloads", THROUGHPUT),
        ("latency", _add_latency_options, "latency", "single steps and prompts, beside their bounds", LATENCY),
        ("startup", _add_startup_options, "startup", "first token, load and installation", STARTUP),
        ("memory", _add_memory_options, "memory_use", "where the memory goes, planned and held", MEMORY),
        ("kernels", _add_kernel_options, "kernels", "products and attention, beside the machine's limits", KERNELS),
        ("gpu-engine", _add_gpu_options, "gpu_engine", "whole runs on a GPU, beside their roofline", GPU_ENGINE),
        ("gpu-predictions", _add_nothing, "gpu_predictions", "what a GPU should reach, by bytes", GPU_PREDICTIONS),
        ("quality", _add_quality_options, "quality", "what narrower numbers do to what a model says", QUALITY),
        ("sharing", _add_sharing_options, "sharing", "blocks saved by several texts of one prompt", SHARING),
        ("fairness", _add_nothing, "fairness", "what fair share gives to tenants who ask differently", FAIRNESS),
        ("record", _add_record_options, "record", "steps, and a cost model fitted to them", RECORD),
        ("serve", _add_serve_options, "serve", "a server under load, and what HTTP costs", SERVE),
        ("structured", _add_structured_options, "structured", "what holding texts to a schema costs", STRUCTURED),
        (
            "simulator",
            _add_simulator_options,
            "simulated",
            "how fast simulations run, and in how much memory",
            SIMULATOR,
        ),
        ("control", _add_control_options, "control", "the control plane, beside vLLM's, where it is there", CONTROL),
    ):
        benchmark = benchmarks.add_parser(name, help=text, description=description)
        add_options(benchmark)
        _add_output_options(benchmark)
        benchmark.set_defaults(run=_runner(module))


THROUGHPUT = (
    "Run workloads from files, one JSON request a line, and measure tokens per second, times to first tokens and "
    "between tokens, cached tokens, preemptions, memory and the time to load."
)
LATENCY = (
    "Measure steps of decodes for contexts and numbers of sequences, beside the time to read weights and KV memory "
    "once, and the time to the first token of prompts."
)
STARTUP = (
    "Measure, each time in a process of its own, how long the guide takes to its first token and a model to be ready; "
    "and add up what an installation brings."
)
MEMORY = (
    "Compare the memory that was planned with what the process holds, at the peak of loading and in service, and "
    "measure how much of the KV memory in use holds nothing."
)
KERNELS = (
    "Measure the bandwidth and the arithmetic of the machine, and products and paged attention beside them, without a "
    "model."
)
GPU_ENGINE = (
    "Run the nano-vllm benchmark, 256 prompts of 1,024 tokens and single streams with random weights, and hold them to "
    "the roofline of the same requests, by ceilings of the device that are measured right before. Say --device cuda."
)
GPU_PREDICTIONS = (
    "Say what attention and whole engines should reach on an H200, from bytes and operations and what is assumed of "
    "it; nothing is measured, and no GPU needs to be there."
)
QUALITY = (
    "Read texts with weights of float32, bfloat16 and int8, and measure the perplexity, how far the distribution of "
    "the next token is from that of float32, and how often the likeliest token is the same."
)
SHARING = (
    "Measure the share of blocks that samples and beams of one prompt save by sharing them, for lengths like those of "
    "the traces in the paper."
)
FAIRNESS = (
    "Count the tokens that fair share computes for tenants whose requests differ in length and in how they end, and "
    "the steps that a small request waits for its first token when another tenant has asked for all there is."
)
RECORD = (
    "Record the steps of an engine under simulated traffic, fit a cost model to them for `quire simulate --steps`, and "
    "compare what it foretells of other traffic with what is measured. Latencies are in milliseconds."
)
SERVE = (
    "Offer load to a server, at given rates or with so many requests under way, and measure times to first tokens and "
    "between tokens, goodput, rejections and errors. MODEL may be the URL of any server with the interface of OpenAI; "
    "otherwise the model is served meanwhile. Without --rates and --concurrency it finds out what the server can do, "
    "and offers half of it, all of it, and twice as much."
)
STRUCTURED = (
    "Serve a model and measure the throughput of many streams, free and held to a schema, and the time to the first "
    "token of a prompt, free and with a schema that nobody has sent before; both in turn. A shape gets a tokenizer of "
    "as many tokens as it says."
)
SIMULATOR = (
    "Measure simulated tokens a second with 256 running requests, and the time and the memory of an hour of traffic. "
    "Needs a machine where nothing else runs."
)
CONTROL = (
    "Measure the control plane: scheduling, memory management and prefix caching, without a model. Every number is a "
    "median over runs, with its spread. Needs a machine where nothing else runs."
)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write everything, all samples included")
    parser.add_argument("--markdown", metavar="FILE", help="write the report, that is printed, to a file as well")
    parser.add_argument("--title", metavar="TEXT", help="of the report; it takes the place of one with the same title")


def _add_throughput_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", metavar="FILE", nargs="+", required=True, help="workloads, run one after another")
    parser.add_argument("--limit", metavar="N", type=_count, default=0, help="only the first N requests of each")
    _add_count(parser, "repeat", 5, "runs of every workload")
    _add_model_options(parser)


def _add_latency_options(parser: argparse.ArgumentParser) -> None:
    _add_counts(parser, "contexts", (256,), "tokens of the context that a step of decodes sees")
    _add_counts(parser, "sequences", (1, 4, 16, 32, 64), "sequences that decode side by side")
    _add_counts(parser, "prompts", (512, 1024, 2048, 4096), "tokens of prompts, for the time to the first token")
    _add_count(parser, "chats", 16, "chats that run beside the longest of the prompts")
    _add_count(parser, "steps", 32, "decode steps in a run")
    _add_count(parser, "repeat", 5, "runs of every measurement")
    _add_size(parser, "read-size", "1GiB", "memory that is read for the bandwidth")
    _add_model_options(parser)


def _add_startup_options(parser: argparse.ArgumentParser) -> None:
    _add_count(parser, "repeat", 5, "processes of each kind")
    _add_size(parser, "read-size", "1GiB", "memory that is read for the bandwidth")
    _add_model_options(parser)


def _add_memory_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", metavar="FILE", help="what is run; default: requests of mixed lengths")
    parser.add_argument("--limit", metavar="N", type=_count, default=0, help="only the first N requests")
    _add_model_options(parser)


def _add_kernel_options(parser: argparse.ArgumentParser) -> None:
    _add_choices(parser, "only", KERNEL_PARTS, KERNEL_PARTS, "measure only these parts")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: paged attention, at points of its own"
    )
    parser.add_argument(
        "--shape",
        metavar="NAME",
        nargs="+",
        default=SHAPES[:2],
        help=f"whose matrices and heads: {', '.join(SHAPES)}, or a model folder; default: {' '.join(SHAPES[:2])}",
    )
    _add_counts(parser, "rows", (1, 2, 4, 8, 16, 32, 64, 256, 512, 2048), "rows of the products")
    _add_counts(parser, "block-sizes", (16, 32, 64, 128), "tokens in a block of attention")
    parser.add_argument(
        "--decodes",
        metavar="NxTOKENS",
        nargs="+",
        type=_decodes,
        default=((1, 8192), (8, 2048), (32, 512)),
        help="sequences and their tokens, of attention; default: 1x8192 8x2048 32x512",
    )
    _add_count(parser, "repeat", 5, "runs of every measurement")
    parser.add_argument("--num-threads", metavar="N", type=_count, help="default: as many as the system grants cores")
    _add_size(parser, "read-size", "1GiB", "memory that is read for the bandwidth")
    _add_size(parser, "working-set", "512MiB", "memory that is gone through in turn, more than the caches hold")


def _add_nothing(parser: argparse.ArgumentParser) -> None:
    """What is predicted, or only counted, takes no options."""


def _add_gpu_options(parser: argparse.ArgumentParser) -> None:
    _add_choices(parser, "only", GPU_MODELS, GPU_MODELS, "measure only these models")
    parser.add_argument("--folder", metavar="FOLDER", help="where weights and workloads are kept, for another time")
    _add_count(parser, "repeat", 5, "runs of every measurement")
    _add_size(parser, "read-size", "4GiB", "memory that is read for the bandwidth")
    add_engine_options(parser)


def _add_quality_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    parser.add_argument("--workload", metavar="FILE", required=True, help="texts that are read: prompts of a workload")
    parser.add_argument("--limit", metavar="N", type=_count, default=0, help="only the first N texts")


def _add_sharing_options(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    _add_count(parser, "requests", 100, "requests for each of the lengths")


def _add_record_options(parser: argparse.ArgumentParser) -> None:
    _add_seconds(parser, "duration", 40.0, "seconds of traffic to fit to, and to foretell at each load")
    parser.add_argument("--load-seed", metavar="N", type=int, default=0, help="of arrivals and prompts; default: 0")
    parser.add_argument("--steps", metavar="FILE", help="write the recorded steps, a JSON object a line")
    _add_model_options(parser)


def _add_serve_options(parser: argparse.ArgumentParser) -> None:
    _add_choices(parser, "only", SERVE_PARTS, SERVE_PARTS, "measure only these parts")
    parser.add_argument("--rates", metavar="RATE", nargs="+", default=(), help="requests a second, or auto (default)")
    parser.add_argument(
        "--concurrency", metavar="N", type=_count, nargs="+", default=(), help="closed loops with so many under way"
    )
    parser.add_argument("--arrivals", choices=("poisson", "fixed"), default="poisson", help="default: poisson")
    _add_seconds(parser, "duration", 30.0, "seconds of a level")
    _add_seconds(parser, "patience", 30.0, "seconds that requests may take to end after that")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default="completions", help="what is asked")
    parser.add_argument("--workload", metavar="FILE", help="requests; default: drawn ones of these lengths")
    parser.add_argument("--limit", metavar="N", type=_count, default=0, help="only the first N requests of the file")
    _add_count(parser, "prompt-tokens", 128, "tokens of a drawn prompt")
    _add_count(parser, "output-tokens", 64, "tokens of its output")
    parser.add_argument(
        "--length-spread", metavar="SHARE", type=_share, default=0.0, help="drawn lengths differ by this share at most"
    )
    parser.add_argument(
        "--goodput", metavar="NAME:MS", nargs="+", default=(), help="what makes a request good, as ttft:500 tpot:50"
    )
    parser.add_argument("--load-seed", metavar="N", type=int, default=0, help="of arrivals and prompts; default: 0")
    parser.add_argument("--plot", metavar="FILE", help="write latency over offered load as SVG")
    _add_count(parser, "streams", 64, "requests at once, for what HTTP and watching cost")
    _add_count(parser, "repeat", 5, "runs of that")
    parser.add_argument(
        "--name", metavar="NAME", default="", help="what the server calls the model; default: its first"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", default="", help="name in the environment that holds the API key"
    )
    parser.add_argument("--vocab-size", metavar="N", type=_count, help="ids of drawn prompts lie below it")
    _add_model_options(parser)


def _add_structured_options(parser: argparse.ArgumentParser) -> None:
    _add_count(parser, "streams", 32, "requests at once")
    _add_count(parser, "prompt-tokens", 128, "tokens of a drawn prompt")
    _add_count(parser, "output-tokens", 128, "tokens of its output")
    _add_count(parser, "schemas", 5, "new schemas in a run")
    _add_count(parser, "repeat", 5, "runs of both kinds")
    parser.add_argument("--load-seed", metavar="N", type=int, default=0, help="of the prompts; default: 0")
    _add_model_options(parser)


def _add_simulator_options(parser: argparse.ArgumentParser) -> None:
    _add_seconds(parser, "duration", 120.0, "simulated seconds of the users")
    _add_count(parser, "hour", 3600, "simulated seconds of the longer traffic, 4 or more")
    _add_count(parser, "repeat", 5, "runs of every measurement")


def _add_control_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer-python", metavar="PATH", help="interpreter that has vLLM; none: only quire is measured")
    parser.add_argument(
        "--peer-script",
        metavar="FILE",
        help="measures the peer; default: ../shared/bench/bench_control_vllm.py, seen from the root of the repository",
    )
    _add_count(parser, "running", 256, "decode requests that run at once")
    _add_count(parser, "prompt", 512, "tokens of a prompt")
    _add_count(parser, "blocks", 100_000, "blocks of the pool")
    _add_count(parser, "steps", 300, "decode steps in a run, 17 or more")
    _add_count(parser, "repeat", 5, "runs of every measurement")
    _add_choices(parser, "only", PARTS, PARTS, "measure only these parts")


# ---- options --------------------------------------------------------------------------------------------------------


def _add_model_options(parser: argparse.ArgumentParser) -> None:
    add_engine_options(parser)
    parser.add_argument(
        "--shape", metavar="NAME", choices=SHAPES, help=f"in place of MODEL, random weights: {', '.join(SHAPES)}"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default="guide", metavar="MODEL", help="model folder; default: the guide")


def _add_count(parser: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    parser.add_argument(f"--{name}", metavar="N", type=_count, default=default, help=f"{text}; default: {default}")


def _add_counts(parser: argparse.ArgumentParser, name: str, default: tuple[int, ...], text: str) -> None:
    shown = " ".join(map(str, default))
    parser.add_argument(
        f"--{name}", metavar="N", type=_count, nargs="+", default=default, help=f"{text}; default: {shown}"
    )


def _add_seconds(parser: argparse.ArgumentParser, name: str, default: float, text: str) -> None:
    parser.add_argument(f"--{name}", metavar="S", type=_seconds, default=default, help=f"{text}; default: {default:g}")


def _add_size(parser: argparse.ArgumentParser, name: str, default: str, text: str) -> None:
    parser.add_argument(
        f"--{name}", metavar="SIZE", type=_size, default=_size(default), help=f"{text}; default: {default}"
    )


def _add_choices(
    parser: argparse.ArgumentParser, name: str, choices: tuple[str, ...], default: tuple[str, ...], text: str
) -> None:
    shown = ", ".join(choices)
    parser.add_argument(
        f"--{name}", metavar="NAME", nargs="+", choices=choices, default=default, help=f"{text}: {shown}"
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be 0 or more, and less than 1")
    return value


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except InvalidConfigError as error:
        raise argparse.ArgumentTypeError(f"must be {error.allowed}") from None
    if size < 1 << 10:
        raise argparse.ArgumentTypeError("must be 1KiB or more")
    return size


def _decodes(text: str) -> tuple[int, int]:
    sequences, _, tokens = text.partition("x")
    return _count(sequences), _count(tokens)


def _runner(module: str) -> Callable[[argparse.Namespace], int]:
    def run(options: argparse.Namespace) -> int:
        status: int = import_module(f"quire.cli.bench.{module}").run(options)
        return status

    return run


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2
