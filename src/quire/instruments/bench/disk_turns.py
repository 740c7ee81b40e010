"""Runs in a separate process: an engine that runs a workload for each line of its input.

    {"settings": {"model": …}, "workload": "…/workload_mixed.jsonl", "limit": 0}     the first line of its input
    1                                                                               a turn: the number of the repeat
    {"tokens_per_s": 312.5, "stored": 118}                                          the answer to each line

Two such processes take turns, one without a disk and one with it. A slow phase of the machine slows both, and neither
pays for the start of the other. A turn ends when everything is written, so that no write disturbs the other's turn.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any, Final

from quire.core.config import EngineConfig
from quire.engine.commands import AskDisk
from quire.instruments.bench.asked_process import AskedProcess
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.workload_file import read_workload

THIS: Final = "quire.instruments.bench.disk_turns"


def run_turns(
    configs: dict[str, EngineConfig], workload: str, limit: int, repeats: range
) -> list[dict[str, dict[str, Any]]]:
    """Return the answers of engines that take turns, for each repeat; the order changes from repeat to repeat."""
    found = []
    with ExitStack() as stack:
        processes = {name: stack.enter_context(AskedProcess(THIS)) for name in configs}
        for name, process in processes.items():
            process.ask({"settings": asdict(configs[name]), "workload": workload, "limit": limit})
        for repeat in repeats:
            order = list(processes) if repeat % 2 else list(reversed(processes))
            answers = {name: processes[name].ask(repeat) for name in order}
            found.append({name: answers[name] for name in processes})
    return found


def main() -> None:
    """Load the engine, and answer line by line."""
    wanted = json.loads(sys.stdin.readline())
    workload = read_workload(wanted["workload"], wanted["limit"])
    with MeasuredEngine(EngineConfig(**wanted["settings"])) as engine:
        engine.warm_up()
        print("{}", flush=True)
        for line in sys.stdin:
            run = engine.run(workload.shifted(int(line), engine.vocab_size).requests)
            while (wait_s := engine.client.ask_s) is not None:
                engine.client.send(AskDisk())
                time.sleep(wait_s)
            stored = engine.client.stats().disk_blocks.get("stored", 0)
            print(json.dumps({"tokens_per_s": run.num_output_tokens / run.wall_s, "stored": stored}), flush=True)


if __name__ == "__main__":
    main()
