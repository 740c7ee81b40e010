"""transformers' continuous batching over its paged cache, by the rules of the runners: on a GPU, or on a CPU.

    python benchmarks/bench_transformers.py --model FOLDER --workload FILE [FILE …] --device cuda --out results.jsonl

Same options, same lines of JSON as bench_quire.py, whose rules it follows; its interpreter needs torch, transformers
and accelerate, and finds quire by PYTHONPATH=src. The manager is started before the warm-up and goes on, so that its
memory and its graphs are made once, as those of any engine that serves.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
import transformers
from bench_quire import parser, result_of, warm_up_requests, write

from quire.instruments.bench.workload_file import Workload, WorkloadRequest, read_workload

STARTS_WITHIN_S = 600
LONGEST_SILENCE_S = 120


class Engine:
    """A model and the manager of its batches."""

    def __init__(self, options: argparse.Namespace) -> None:
        dtype = getattr(torch, options.dtype)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).to(options.device).eval()
        model.generation_config.eos_token_id = model.config.eos_token_id = None
        self.vocab_size: int = model.config.vocab_size
        sizes: dict[str, Any] = {"max_requests_per_batch": options.max_seqs}
        if options.max_batch_tokens:
            sizes["max_batch_tokens"] = options.max_batch_tokens
        if options.device == "cpu":  # where it does not find out how much memory is free
            sizes |= {"page_size": 32, "num_blocks": 1024}
        batching = transformers.ContinuousBatchingConfig(**sizes)
        generation = transformers.GenerationConfig(
            do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=options.most_new_tokens
        )
        self._stack = ExitStack()
        self._manager = self._stack.enter_context(
            model.continuous_batching_context_manager(
                generation_config=generation, continuous_batching_config=batching, block=True, timeout=STARTS_WITHIN_S
            )
        )

    def generate(self, requests: Sequence[WorkloadRequest]) -> float:
        """Return the seconds that it took; raises where an output is not as long as was asked."""
        wanted: dict[str, int] = {}
        started = last = time.perf_counter()
        for each in requests:
            name = self._manager.add_request(list(each.prompt_token_ids), max_new_tokens=each.max_tokens)
            wanted[name] = each.max_tokens
        while wanted:
            result = self._manager.get_result(timeout=1)
            if result is None:
                if not self._manager.is_running() or time.perf_counter() - last > LONGEST_SILENCE_S:
                    raise SystemExit(f"transformers stopped with {len(wanted)} requests left")
                continue
            last = time.perf_counter()
            if result.is_finished() and len(result.generated_tokens) != wanted.pop(result.request_id):
                raise SystemExit(f"request {result.request_id}: {len(result.generated_tokens)} tokens {result.error}")
        return time.perf_counter() - started

    def close(self) -> None:
        self._stack.close()


def measure(options: argparse.Namespace, workloads: Sequence[Workload]) -> None:
    torch.set_num_threads(options.threads)
    started = time.perf_counter()
    engine = Engine(options)
    loaded = time.perf_counter()
    vocab_size = options.vocab or engine.vocab_size
    warm_up_s = engine.generate(warm_up_requests(vocab_size))
    fixed = {
        "peer": "transformers",
        "version": f"transformers {transformers.__version__} torch {torch.__version__}",
        "label": options.label or options.device,
        "dtype": options.dtype,
        "threads": options.threads,
    }
    number = 1
    for workload in workloads:
        for repeat in range(options.repeat):
            number += 1
            wall_s = engine.generate(workload.shifted(number, vocab_size).requests)
            result = fixed | result_of(workload, repeat, wall_s)
            result |= {"load_s": round(loaded - started, 2), "warmup_s": round(warm_up_s, 1)}
            write(result | {"python": platform.python_version()}, options.out)
    engine.close()


def main() -> int:
    made = parser()
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = made.parse_args()
    workloads = [read_workload(path, options.limit) for path in options.workload]
    if any(request.n > 1 for workload in workloads for request in workload.requests):
        raise SystemExit("bench_transformers: several outputs of one prompt are not measured")
    options.most_new_tokens = max(request.max_tokens for workload in workloads for request in workload.requests)
    measure(options, workloads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
