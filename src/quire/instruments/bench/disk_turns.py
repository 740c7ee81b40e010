"""Runs in a separate process: an engine that runs a workload for each line of its input.

    {"settings": {"model": …}, "workload": "…/workload_mixed.jsonl", "limit": 0}     the first line of its input
    1                                                                               a turn: the number of the repeat
    {"tokens_per_s": 312.5, "stored": 118}                                          the answer to each line

Two such processes take turns, one without a disk and one with it. A slow phase of the machine slows both, and neither
pays for the start of the other. A turn ends when everything is written, so that no write disturbs the other's turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from types import TracebackType
from typing import Any

from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.python_process import start_python
from quire.engine.commands import AskDisk
from quire.instruments.bench.measured_engine import MeasuredEngine
from quire.instruments.bench.workload_file import read_workload


class TurnProcess:
    """A process that runs a workload on its own engine."""

    def __init__(self, config: EngineConfig, workload: str, limit: int) -> None:
        wanted = {"settings": asdict(config), "workload": workload, "limit": limit}
        pipe = subprocess.PIPE
        self._process = start_python(
            *("-m", "quire.instruments.bench.disk_turns"), stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )
        self._ask(json.dumps(wanted))

    def turn(self, repeat: int) -> dict[str, Any]:
        """Return the tokens per second of a run, and the blocks stored so far."""
        return self._ask(str(repeat))

    def _ask(self, line: str) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(line, file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            _, errors = process.communicate()
            last = errors.splitlines()[-1:] or ["it printed nothing"]
            raise ExecutionError(f"a process ended with status {process.returncode}: {last[0]}")
        found: dict[str, Any] = json.loads(answer)
        return found

    def __enter__(self) -> TurnProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()


def run_turns(
    configs: dict[str, EngineConfig], workload: str, limit: int, repeats: range
) -> list[dict[str, dict[str, Any]]]:
    """Return the answers of engines that take turns, for each repeat; the order changes from repeat to repeat."""
    found = []
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(TurnProcess(config, workload, limit)) for name, config in configs.items()
        }
        for repeat in repeats:
            order = list(processes) if repeat % 2 else list(reversed(processes))
            answers = {name: processes[name].turn(repeat) for name in order}
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
