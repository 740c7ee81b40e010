"""Runs quire and the peers that are installed, one after another and again, and writes one table and one plot.

    python benchmarks/compare.py --model FOLDER --vllm-python PEER/bin/python

Every peer has a runner with one command line (see --runners) and an interpreter of its own. A peer that fails is left
out from then on, and the page says why.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from bar_plot import draw
from comparison import QUIRE, Comparison, Line

from quire._native import cpu_features
from quire.compute.models import read_model
from quire.compute.models.hub import resolve_settings
from quire.reporting.machine import MAX_IDLE_LOAD, OthersMeter
from quire.reporting.results import NOT_CLAIMED, is_busy, is_loaded, render_results, start_facts, write_json, write_part

HERE = Path(__file__).resolve().parent
TITLE = "Throughput beside the peers"
WORKLOADS = ("single", "ttft512", "parallel", "prefix", "mixed")


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, or one way to run it."""

    name: str
    command: list[str]
    kv_memory: str
    environment: dict[str, str] = field(default_factory=dict)


class EngineError(Exception):
    """An engine did not run."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--model",
        required=True,
        help="model folder of Hugging Face, for quire and vLLM; or a GGUF file, for quire and llama.cpp",
    )
    made.add_argument("--runners", type=Path, default=HERE.parent / "../shared/bench", help="the peers' runners")
    made.add_argument("--workload", nargs="+", help=f"files; default: {', '.join(WORKLOADS)} with the runners")
    made.add_argument("--repeat", type=int, default=5)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--limit", type=int, default=0, help="only the first N requests of each workload")
    made.add_argument("--kv-gib", type=int, default=4, help="KV pool of every engine, GiB")
    made.add_argument("--timeout", type=int, default=3600, help="seconds that one run of one engine may take")
    made.add_argument("--quire-args", default="", help="more options for bench_quire.py")
    made.add_argument(
        "--variant", metavar="NAME=OPTIONS", action="append", default=[], help="quire once more, with other options"
    )
    made.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM")
    made.add_argument("--vllm-args", default="", help="more options for bench_vllm.py")
    made.add_argument("--openvino-python", metavar="PATH", help="interpreter that has OpenVINO GenAI")
    made.add_argument("--openvino-model", metavar="FOLDER", help="the model as optimum-cli exports it")
    made.add_argument(
        "--openvino-int8", action="store_true", help="that model has int8 weights; give it KV memory of 8 bits"
    )
    made.add_argument("--openvino-args", default="", help="more options for bench_openvino.py")
    made.add_argument("--llamacpp-python", metavar="PATH", help="any interpreter; LLAMA_CPP_BIN names the binaries")
    made.add_argument("--llamacpp-model", metavar="FILE", help="the model as .gguf")
    made.add_argument("--llamacpp-args", default="", help="more options for bench_llamacpp.py")
    made.add_argument("--transformers-python", metavar="PATH", help="interpreter that has torch and transformers")
    made.add_argument("--transformers-args", default="", help="more options for bench_transformers.py")
    made.add_argument("--title", default=TITLE, help="of the part that is written; default: %(default)s")
    made.add_argument("--page", type=Path, default=HERE / "RESULTS.md", help="default: benchmarks/RESULTS.md")
    made.add_argument("--results", type=Path, default=HERE / "results", help="default: benchmarks/results")
    return made


def engines_of(options: argparse.Namespace) -> Iterator[Engine]:
    """Yield the engines that were named, quire first."""
    gib, runners = options.kv_gib, options.runners
    variants = {QUIRE: options.quire_args} | {
        f"{QUIRE} {name}": f"{options.quire_args} {arguments}"
        for name, _, arguments in (text.partition("=") for text in options.variant)
    }
    for name, arguments in variants.items():
        command = [sys.executable, str(HERE / "bench_quire.py"), "--model", options.model, "--kv-memory", f"{gib}GiB"]
        how = f"{gib} GiB" if "--kv-dtype" in arguments else f"bfloat16, {gib} GiB"
        yield Engine(name, [*command, *shlex.split(arguments)], with_options(how, arguments))
    if options.vllm_python:
        command = [options.vllm_python, str(runners / "bench_vllm.py"), "--model", options.model]
        how = f"as the weights (bfloat16), {gib} GiB"
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(gib)}
        command += shlex.split(options.vllm_args)
        yield Engine("vLLM", command, with_options(how, options.vllm_args), environment)
    if options.openvino_python:
        narrow = "int8" if options.openvino_int8 else ""
        # On a processor without bfloat16, OpenVINO refuses it.
        computes, keeps = ("bf16", "bf16") if cpu_features()["avx512_bf16"] else ("f32", "f16")
        if narrow:
            keeps = "u8"
        model = options.openvino_model or options.model
        command = [options.openvino_python, str(runners / "bench_openvino.py"), "--model", model]
        command += ["--dtype", narrow or "fp16 weights", "--cache-gb", str(gib)]
        command += ["--precision", computes, "--kv-precision", keeps]
        command += shlex.split(options.openvino_args)
        how = f"{keeps}, {gib} GiB" + ("" if narrow else "; weights are stored in fp16") + f", computed in {computes}"
        yield Engine(f"OpenVINO {narrow}".strip(), command, with_options(how, options.openvino_args))
    if options.llamacpp_python:
        model, tokens = options.llamacpp_model or options.model, pool_tokens(options.model, gib)
        command = [options.llamacpp_python, str(runners / "bench_llamacpp.py"), "--model", model]
        command += ["--ctx", str(tokens), "--extra=-ctk bf16 -ctv bf16"]
        how = f"bfloat16, {tokens:,} tokens ({gib} GiB), in one buffer and not paged; requests go through HTTP"
        command += shlex.split(options.llamacpp_args)
        yield Engine("llama.cpp", command, with_options(how, options.llamacpp_args))
    if options.transformers_python:
        command = [options.transformers_python, str(HERE / "bench_transformers.py"), "--model", options.model]
        environment = {"PYTHONPATH": str(HERE.parent / "src")}
        command += shlex.split(options.transformers_args)
        yield Engine("transformers", command, with_options("as it sizes them", options.transformers_args), environment)


def with_options(how: str, arguments: str) -> str:
    """Return how an engine is run, with the options that were given for it."""
    return f"{how}; `{arguments.strip()}`" if arguments.strip() else how


def pool_tokens(model: str, gib: int) -> int:
    """Return how many tokens a pool of this many GiB holds in bfloat16."""
    spec = read_model(resolve_settings(model)).spec
    bytes_per_token = 4 * len(spec.layers) * spec.attention.num_kv_heads * spec.attention.head_dim
    return gib * 2**30 // bytes_per_token


def run_engine(engine: Engine, options: argparse.Namespace) -> list[Line]:
    """Run all workloads once in a new process; return its lines."""
    workloads = options.workload or [str(options.runners / f"workload_{name}.jsonl") for name in WORKLOADS]
    with tempfile.TemporaryDirectory(prefix="quire-compare-") as folder:
        out = Path(folder) / "lines.jsonl"
        rules = ["--repeat", "1", "--threads", str(options.threads), "--limit", str(options.limit), "--out", str(out)]
        try:
            done = subprocess.run(
                [*engine.command, *rules, "--workload", *workloads],
                env=os.environ | engine.environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=options.timeout,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise EngineError(" ".join(str(error).split())[:200]) from error
        if done.returncode or not out.is_file():
            *_, last = ["it said nothing", *done.stderr.strip().splitlines()]
            raise EngineError(f"it ended with status {done.returncode}: {last}")
        return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]


def compare(engines: Sequence[Engine], options: argparse.Namespace) -> Comparison:
    """Run every engine once in each repeat; who is first turns."""
    comparison = Comparison({engine.name: engine.kv_memory for engine in engines})
    for repeat in range(options.repeat):
        found: dict[str, list[Line] | None] = {}
        turn = repeat % len(engines)
        for engine in [*engines[turn:], *engines[:turn]]:
            if engine.name in comparison.failures:
                continue
            tell(f"repeat {repeat + 1} of {options.repeat}: {engine.name}")
            try:
                found[engine.name] = run_engine(engine, options)
            except EngineError as error:
                tell(f"{engine.name} is left out: {error}")
                comparison.failures[engine.name] = str(error)
        comparison.repeats.append(found)
    return comparison


def tell(text: str) -> None:
    print(f"compare: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    engines = list(engines_of(options))
    facts, others = start_facts(), OthersMeter()
    facts["command"] = shlex.join(["python", "benchmarks/compare.py", *(arguments or sys.argv[1:])])
    if is_loaded(facts):
        tell(f"warning: load average above {MAX_IDLE_LOAD}, so something else is running: these numbers are no claim")
    comparison = compare(engines, options)
    if QUIRE in comparison.failures:
        print(f"compare: error: quire did not run: {comparison.failures[QUIRE]}", file=sys.stderr)
        return 1
    facts["processors_busy_with_others"] = others.num_busy()
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    options.results.mkdir(parents=True, exist_ok=True)
    subject = "throughput" if options.title == TITLE else "-".join(re.findall(r"\w+", options.title.lower()))
    plot = options.results / f"{subject}-{date}.svg"
    title = options.title + (" (busy machine: no claim)" if is_busy(facts) else "")
    plot.write_text(draw(title, comparison.panels()), encoding="utf-8")
    sections = comparison.sections()
    write_json(plot.with_suffix(".json"), {**facts, "samples": {each.title: each.samples for each in sections}})
    page = render_results(facts, options.title, sections)
    shown = os.path.relpath(plot, options.page.resolve().parent)
    write_part(options.page, f"{page}\n\n![One bar for each engine]({shown})")
    print(page)
    if is_busy(facts):
        tell(NOT_CLAIMED.strip("*"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
