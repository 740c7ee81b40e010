"""quire, by the rules of the peers' runners: same options, same measuring, same lines of JSON.

    python benchmarks/bench_quire.py --model FOLDER --workload FILE [FILE …] --out results.jsonl

The rules, the same for every engine: prompts are token ids and all requests are handed over at once. Greedy, or
temperature 1 where there are several outputs; the end of text is ignored. Wall time is that of `generate` alone,
after loading and a warm-up. Every repeat shifts all ids, so that nothing comes from the cache of an earlier one. A
workload of one request with several tokens is run again with one, which gives the time to the first token. The peak of
memory is that of the tree of processes, looked at every 0.2 s.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import quire
from quire import LLM
from quire.core.errors import ExecutionError, InvalidConfigError, InvalidValueError, QuireError
from quire.instruments.bench.workload_file import Workload, WorkloadRequest, read_workload, single_request
from quire.reporting.machine import describe_versions

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
LOOK_EVERY_S = 0.2


def parser() -> argparse.ArgumentParser:
    models = Path(os.environ.get("MODELS_DIR", "models"))
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", default=str(models / "qwen3-0.6b-rand"))
    made.add_argument("--workload", nargs="+", required=True)
    made.add_argument("--out", default="-", help="lines of JSON are appended here; -: stdout")
    made.add_argument("--repeat", type=int, default=2)
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--label", default="", help="free text, kept in the result")
    made.add_argument("--limit", type=int, default=0, help="only the first N requests")
    made.add_argument("--vocab", type=int, default=0, help="token ids of the model; default: as its config says")
    made.add_argument("--no-prefix", action="store_true", help="no prefix caching")
    made.add_argument("--block", type=int, default=0, help="tokens in a block; 0: the default of quire")
    made.add_argument("--max-seqs", type=int, default=64)
    made.add_argument("--max-batch-tokens", type=int, default=0, help="tokens of a step; 0: the default of quire")
    made.add_argument("--kv-dtype", default="", help="type of keys and values, where quire has a choice")
    made.add_argument("--quantization", default="", help="type of the weights, where quire has a choice")
    made.add_argument("--kv-memory", default="4GiB", help="KV pool; the peers' runners give 4 GiB")
    made.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="any setting of EngineConfig")
    return made


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the engine, by name."""
    settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "num_threads": options.threads,
        "dtype": options.dtype,
        "max_num_seqs": options.max_seqs,
        "enable_prefix_caching": not options.no_prefix,
        "kv_memory": options.kv_memory,
    }
    for name, value in (
        ("block_size", options.block),
        ("max_num_batched_tokens", options.max_batch_tokens),
        ("kv_dtype", options.kv_dtype),
        ("weights", options.quantization),
    ):
        if value:
            settings[name] = value
    for text in options.set:
        name, _, value = text.partition("=")
        settings[name] = int(value) if value.isdecimal() else {"true": True, "false": False}.get(value, value)
    return settings


class Engine:
    """quire, as its users call it."""

    def __init__(self, options: argparse.Namespace) -> None:
        settings = settings_of(options)
        try:
            self.llm = LLM(options.model, **settings)
        except TypeError as error:  # a setting that this version does not have
            raise InvalidConfigError("settings", str(error), "fields of EngineConfig") from None

    @property
    def vocab_size(self) -> int:
        return self.llm.engine.scheduler.limits.vocab_size

    def generate(self, requests: Sequence[WorkloadRequest]) -> float:
        """Return the seconds that it took; raises where an output is not as long as was asked."""
        prompts = [list(request.prompt_token_ids) for request in requests]
        sampling = [request.sampling for request in requests]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        wall_s = time.perf_counter() - started
        for request, output in zip(requests, outputs, strict=True):
            lengths = [len(each.token_ids) for each in output.outputs]
            if lengths != [request.max_tokens] * request.n:
                raise ExecutionError(f"request {output.request_id}: outputs of {lengths} tokens {output.error}")
        return wall_s

    def close(self) -> None:
        self.llm.close()


class PeakMemory(threading.Thread):
    """The most that this process and its children held since `peak` was set to 0."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0
        self.start()

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(LOOK_EVERY_S)

    def look(self) -> None:
        self.peak = max(self.peak, tree_bytes(os.getpid()))


def tree_bytes(root: int) -> int:
    """Return the bytes that a process and those below it hold in memory."""
    children: dict[int, list[int]] = {}
    held: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        held[int(folder.name)] = int(fields[21]) * PAGE_BYTES
    total, left = 0, [root]
    while left:
        process = left.pop()
        total += held.get(process, 0)
        left += children.get(process, [])
    return total


def warm_up_requests(vocab_size: int) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(tuple((300 + 7 * position) % vocab_size for position in range(24 + index)), 4)
        for index in range(2)
    ]


def measure(options: argparse.Namespace, workloads: Sequence[Workload]) -> None:
    memory = PeakMemory()
    started = time.perf_counter()
    engine = Engine(options)
    load_s = time.perf_counter() - started
    vocab_size = options.vocab or engine.vocab_size
    warm_up_s = engine.generate(warm_up_requests(vocab_size))
    report, number = engine.llm.report, 1
    fixed = {
        "peer": "quire",
        "version": " ".join(f"{name} {value}" for name, value in describe_versions().items() if name != "python"),
        "label": options.label or f"{report.instruction_set} batch_tokens={report.max_num_batched_tokens}",
        "dtype": report.weight_type if options.model.endswith(".gguf") else options.dtype,
        "threads": options.threads,
    }
    for workload in workloads:
        for repeat in range(options.repeat):
            number += 1
            memory.peak = 0
            wall_s = engine.generate(workload.shifted(number, vocab_size).requests)
            memory.look()
            result = fixed | result_of(workload, repeat, wall_s)
            result |= {
                "peak_rss_gib": round(memory.peak / 2**30, 2),
                "load_s": round(load_s, 1) if load_s >= 10 else round(load_s, 2),
                "warmup_s": round(warm_up_s, 1),
                "python": platform.python_version(),
            }
            single = single_request(workload)
            if single is not None:
                number += 1
                (again,) = workload.shifted(number, vocab_size).requests
                first_token_s = engine.generate([replace(again, max_tokens=1)])
                result["ttft_s"] = round(first_token_s, 4)
                result["decode_tok_s"] = round((single.max_tokens - 1) / (wall_s - first_token_s), 2)
            write(result, options.out)
    engine.close()


def result_of(workload: Workload, repeat: int, wall_s: float) -> dict[str, Any]:
    num_prompt, num_output = workload.num_prompt_tokens, workload.num_output_tokens
    return {
        "workload": workload.name,
        "rep": repeat,
        "requests": len(workload.requests),
        "prompt_tokens": num_prompt,
        "output_tokens": num_output,
        "wall_s": round(wall_s, 3),
        "out_tok_s": round(num_output / wall_s, 2),
        "total_tok_s": round((num_prompt + num_output) / wall_s, 2),
    }


def write(result: dict[str, Any], out: str) -> None:
    line = json.dumps(result)
    print(line, file=sys.stderr, flush=True)
    if out == "-":
        print(line, flush=True)
    else:
        with open(out, "a", encoding="utf-8") as file:
            file.write(line + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        measure(options, [read_workload(path, options.limit) for path in options.workload])
    except (QuireError, OSError) as error:
        print(f"bench_quire {quire.__version__}: error:", " ".join(str(error).split()), file=sys.stderr)
        return 2 if isinstance(error, InvalidValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
