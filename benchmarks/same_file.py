"""GGUF files in quire and in llama.cpp, in turn: python benchmarks/same_file.py --help.

Both compute a prompt of 512 tokens, 128 tokens after a short prompt, and the same for 16 sequences at once, on the same
number of threads. llama-bench and llama-batched-bench are loops in C++ without a sampler; quire's numbers are those of
`LLM.generate`, with everything around a step. Then each starts, reads the file and computes one token: in how many
seconds from the start of the program, in how many from the opening of the file (for quire: without Python's imports;
for llama.cpp the same), and with how much memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from quire import LLM, SamplingParams
from quire.core.granted import usable_cores
from quire.reporting.report import Section, cell
from quire.reporting.results import Tell, run_benchmark
from quire.reporting.samples import ratios, summarize

PROMPT, SHORT, OUTPUT, STREAMS = 512, 8, 128, 16
PROGRAM = "python benchmarks/same_file.py"
HEADER = ("what", "quire", "llama.cpp", "quire to llama.cpp")
ROWS = (
    f"a prompt of {PROMPT}, tok/s",
    f"one stream of {OUTPUT}, tok/s",
    f"{STREAMS} streams of {OUTPUT}, tok/s",
    "file to token, s",
    "start to token, s",
    "memory, MB",
)
FIRST_TOKEN = f"""
import sys, time
from quire import LLM, SamplingParams
start = time.perf_counter()
settings = dict(kv_memory="64MiB", max_model_len=512, skip_tokenizer_init=True)
llm = LLM(sys.argv[1], num_threads=int(sys.argv[2]), **settings)
llm.generate([[5] * {SHORT}], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
print(time.perf_counter() - start)
"""

# A program counts the memory of the process that started it, as it was then: this one is small.
LAUNCH = """
import os, sys
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""


class Quire:
    """The file in quire."""

    def __init__(self, path: str, num_threads: int) -> None:
        self._llm = LLM(
            path, num_threads=num_threads, kv_memory="1GiB", enable_prefix_caching=False, skip_tokenizer_init=True
        )
        self._random = np.random.default_rng(0)
        self._seconds(16, 1, SHORT)

    def _seconds(self, prompt: int, streams: int, output: int) -> float:
        prompts = [self._random.integers(5, 1000, prompt).tolist() for _ in range(streams)]
        start = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
        self._llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def run(self) -> list[float]:
        """Return tokens per second of a prompt, of one stream and of many."""
        first, many_first = self._seconds(SHORT, 1, 1), self._seconds(SHORT, STREAMS, 1)
        one = self._seconds(SHORT, 1, 1 + OUTPUT) - first
        many = self._seconds(SHORT, STREAMS, 1 + OUTPUT) - many_first
        return [PROMPT / self._seconds(PROMPT, 1, 1), OUTPUT / one, STREAMS * OUTPUT / many]


def start_of(command: Sequence[str]) -> list[float]:
    """Run a program; return the seconds that it says or took, those that it took, and the megabytes that it held."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-P", "-c", LAUNCH, *command], capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    text, _, kilobytes = done.stdout.strip().rpartition(chr(10))
    return [seconds if "|" in text else float(text), seconds, int(kilobytes) * 1024 / 1e6]


def last_lines(command: Sequence[str]) -> list[dict[str, float]]:
    """Run a program of llama.cpp that prints JSON: a list, or a line for each result."""
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = (
        json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines() if "{" in line]
    )
    return list(found)


def run_llama(programs: Path, path: str, num_threads: int) -> list[float]:
    """Return tokens per second of a prompt, of one stream and of many."""
    common = ["-m", path, "-t", str(num_threads)]
    alone = [str(programs / "llama-bench"), *common, "-p", str(PROMPT), "-n", str(OUTPUT), "-r", "1", "-o", "json"]
    prompt, output = last_lines(alone)
    sizes = ["-npp", str(SHORT), "-ntg", str(OUTPUT), "-npl", str(STREAMS), "-c", str(STREAMS * (SHORT + OUTPUT))]
    many = last_lines([str(programs / "llama-batched-bench"), *common, *sizes, "--output-format", "jsonl"])
    return [prompt["avg_ts"], output["avg_ts"], many[-1]["speed_tg"]]


def measure(options: argparse.Namespace, path: str, tell: Tell) -> Section:
    """Measure both in turn, on one file."""
    threads = options.num_threads
    quire = Quire(path, threads)
    ours, theirs = [], []
    start_quire = [sys.executable, "-P", "-c", FIRST_TOKEN, path, str(threads)]
    start_llama = [str(options.llama_cpp / "llama-bench"), "-m", path, "-t", str(threads), "-p", str(SHORT)]
    start_llama += ["-n", "0", "-r", "1", "--no-warmup"]
    for index in range(options.repeat):
        tell(f"{Path(path).name}: run {index + 1} of {options.repeat}")
        ours.append(quire.run() + start_of(start_quire))
        theirs.append(run_llama(options.llama_cpp, path, threads) + start_of(start_llama))
    rows = []
    for place, what in enumerate(ROWS):
        own, other = [run[place] for run in ours], [run[place] for run in theirs]
        rows.append((what, cell(summarize(own)), cell(summarize(other)), cell(summarize(ratios(own, other)))))
    megabytes = os.path.getsize(path) / 1e6
    text = (
        f"{threads} threads; the file has {megabytes:,.0f} MB; median of {options.repeat} runs (min–max), in turn; "
        "ratios within each run."
    )
    return Section(Path(path).name, text, HEADER, rows, {"quire": ours, "llama.cpp": theirs})


def sections(options: argparse.Namespace, tell: Tell) -> Iterator[Section]:
    """Measure one file after the other."""
    for path in options.models:
        yield measure(options, path, tell)


def main() -> int:
    """Measure, print, and write what was asked for."""
    parser = argparse.ArgumentParser(description="Run GGUF files in quire and in llama.cpp, in turn.")
    parser.add_argument("models", nargs="+", metavar="FILE", help="GGUF files")
    help_text = "the folder of llama-bench and llama-batched-bench"
    parser.add_argument("--llama-cpp", required=True, type=Path, metavar="FOLDER", help=help_text)
    parser.add_argument("--num-threads", type=int, default=usable_cores())
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--markdown", metavar="FILE")
    parser.add_argument("--title", default="The same GGUF file in llama.cpp")
    options = parser.parse_args()
    return run_benchmark(options, options.title, lambda tell: sections(options, tell), program=PROGRAM)


if __name__ == "__main__":
    raise SystemExit(main())
