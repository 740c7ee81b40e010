"""AskedProcess: a module in a process of its own, which answers each line of its input with one line, both JSON."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from quire.core.errors import ExecutionError
from quire.core.python_process import start_python


class AskedProcess:
    """The process. A context manager: its input is closed at the end, and it is waited for."""

    def __init__(self, module: str) -> None:
        pipe = subprocess.PIPE
        self._process = start_python("-m", module, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def ask(self, question: object) -> dict[str, Any]:
        """Return the answer. Waits; raises `ExecutionError` if the process ends without one."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(question), file=process.stdin, flush=True)
        answer = process.stdout.readline()
        if not answer:
            _, errors = process.communicate()
            raise ended(process.returncode, errors)
        found: dict[str, Any] = json.loads(answer)
        return found

    def kill(self) -> None:
        """Kill the process."""
        self._process.kill()

    def __enter__(self) -> AskedProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def ended(status: int, errors: str) -> ExecutionError:
    """Return the error for a process that ended too soon, with the last line that it printed to stderr."""
    *_, last = ["it printed nothing", *errors.splitlines()]
    return ExecutionError(f"a process ended with status {status}: {last}")
