"""One GGUF file in quire and in llama.cpp's own llama-bench, in turn: python benchmarks/same_file.py --help.

Both compute a prompt of 512 tokens, and then 128 tokens after a short prompt, on the same number of threads.
llama-bench is a loop in C++ without a sampler; quire's numbers are those of `LLM.generate`, with everything around a
step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time

import numpy as np

from quire import LLM, SamplingParams
from quire.core.granted import usable_cores
from quire.reporting.report import Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import ratios, summarize

PROMPT, OUTPUT, STREAMS = 512, 128, 16
PROGRAM = "python benchmarks/same_file.py"
HEADER = ("what", "quire, tok/s", "llama.cpp, tok/s", "quire to llama.cpp")


class Quire:
    """The file in quire."""

    def __init__(self, path: str, num_threads: int) -> None:
        settings = {"kv_memory": "1GiB", "enable_prefix_caching": False, "skip_tokenizer_init": True}
        self._llm = LLM(path, num_threads=num_threads, **settings)
        self._random = np.random.default_rng(0)
        self._seconds(16, 1, 8)

    def _seconds(self, prompt: int, streams: int, output: int) -> float:
        prompts = [self._random.integers(5, 1000, prompt).tolist() for _ in range(streams)]
        start = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def run(self) -> tuple[float, float, float]:
        """Return tokens per second of a prompt, of one stream and of many."""
        first, many_first = self._seconds(8, 1, 1), self._seconds(8, STREAMS, 1)
        one = self._seconds(8, 1, 1 + OUTPUT) - first
        many = self._seconds(8, STREAMS, 1 + OUTPUT) - many_first
        return PROMPT / self._seconds(PROMPT, 1, 1), OUTPUT / one, STREAMS * OUTPUT / many


def run_llama(program: str, path: str, num_threads: int) -> tuple[float, float]:
    """Return tokens per second of a prompt and of one stream."""
    command = [program, "-m", path, "-p", str(PROMPT), "-n", str(OUTPUT), "-t", str(num_threads), "-r", "1"]
    done = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, check=True)
    prompt, output = json.loads(done.stdout)
    return prompt["avg_ts"], output["avg_ts"]


def measure(options: argparse.Namespace, tell: Tell) -> Section:
    """Measure both in turn."""
    quire = Quire(options.model, options.num_threads)
    ours, theirs = [], []
    for index in range(options.repeat):
        tell(f"run {index + 1} of {options.repeat}")
        ours.append(quire.run())
        theirs.append(run_llama(options.llama_bench, options.model, options.num_threads))
    rows = []
    for place, what in enumerate((f"a prompt of {PROMPT}", f"one stream of {OUTPUT}")):
        own, other = [run[place] for run in ours], [run[place] for run in theirs]
        rows.append((what, cell(summarize(own)), cell(summarize(other)), cell(summarize(ratios(own, other)))))
    rows.append((f"{STREAMS} streams of {OUTPUT}", cell(summarize([run[2] for run in ours])), "–", "–"))
    text = f"{options.num_threads} threads; median of {options.repeat} runs (min–max), in turn; ratios within each run."
    return Section("The same file", text, HEADER, rows, {"quire": ours, "llama.cpp": theirs})


def main() -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description="Run one GGUF file in quire and in llama-bench, in turn.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--llama-bench", required=True, metavar="PROGRAM", help="llama.cpp's llama-bench")
    parser.add_argument("--num-threads", type=int, default=usable_cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    parser.add_argument("--title", default="The same GGUF file in llama.cpp")
    options = parser.parse_args()
    return run_benchmark(options, options.title, lambda tell: iter([measure(options, tell)]), program=PROGRAM)


if __name__ == "__main__":
    raise SystemExit(main())
