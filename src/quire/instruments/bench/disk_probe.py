"""Runs in a separate process: answers prompts one after another with a disk cache, and prints the time of each.

    {"settings": {"model": …}, "prompts": [[1, 2, …], …], "to_store": 256}     the first line of its input
    {"first_token_s": [1.5, …], "disk_tokens": [0, …]}                         its output

It prints its output when `to_store` blocks are on disk, and then waits for the end of its input. So its parent chooses
how it ends: by closing the input, or by a `kill -9`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Final

from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.engine.client import ASK_S
from quire.engine.commands import AskDisk
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.workload_file import WorkloadRequest

STORE_S: Final = 120.0


def first_token_s(engine: MeasuredEngine, prompt: Sequence[int]) -> float:
    """Return the seconds to the first token of a single prompt. Mutates the engine."""
    (seconds,) = engine.run([WorkloadRequest(tuple(prompt), 1)]).first_token_s.values()
    return seconds


def wait_stored(engine: MeasuredEngine, num_blocks: int) -> None:
    """Wait until `num_blocks` are on disk; raises `ExecutionError` if that takes too long. Mutates the engine."""
    end = time.perf_counter() + STORE_S
    while (num_stored := engine.client.stats().disk_blocks.get("stored", 0)) < num_blocks:
        if time.perf_counter() > end:
            raise ExecutionError(f"{num_stored} blocks of {num_blocks} are stored after {STORE_S:g} s")
        engine.client.send(AskDisk())
        time.sleep(ASK_S)


def main() -> None:
    """Load, answer, print, and wait."""
    wanted = json.loads(sys.stdin.readline())
    with MeasuredEngine(EngineConfig(**wanted["settings"])) as engine:
        engine.warm_up()
        seconds, from_disk = [], []
        for prompt in wanted["prompts"]:
            before = engine.client.stats().disk_hit_tokens_total
            seconds.append(first_token_s(engine, prompt))
            from_disk.append(engine.client.stats().disk_hit_tokens_total - before)
        wait_stored(engine, wanted["to_store"])
        print(json.dumps({"first_token_s": seconds, "disk_tokens": from_disk}), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
