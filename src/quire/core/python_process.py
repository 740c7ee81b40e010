"""How quire starts Python processes: they cannot import anything from the current folder.

    python -P -m quire.engine.process.engine_host …        PYTHONPATH: absolute entries only

`python -m` and `python -c` put the current folder first on `sys.path`, before the standard library. So `quire serve .`,
run in a model folder from a stranger, would import its `queue.py`. `-P` prevents that. Entries of PYTHONPATH that are
relative to the current folder are dropped, the empty one too. PYTHONSAFEPATH passes this on to processes that
libraries start.

The new process imports the same quire: its folder is added to PYTHONPATH, unless Python finds it anyway.
"""

from __future__ import annotations

import os
import site
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from quire.core.errors import ExecutionError

COMMAND_S: Final = 30.0


def start_python(
    *arguments: str, environment: Mapping[str, str] | None = None, python: str = "", **options: Any
) -> subprocess.Popen[Any]:
    """Start Python with `options` of `Popen`. `python` and `environment` default to those of this process."""
    program = python or sys.executable
    if not program:
        raise ExecutionError("cannot start a process: sys.executable is empty; set it to the Python interpreter")
    environ = safe_environment(os.environ if environment is None else environment, is_ours=program == sys.executable)
    return subprocess.Popen([program, "-P", *arguments], env=environ, **options)


def run_python(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    timeout_s: float = COMMAND_S,
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder, without input, until it ends; return its output. Raises `subprocess.TimeoutExpired`."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start_python(*arguments, environment=environment, cwd=folder, text=True, **pipes) as process:
        try:
            printed = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, *printed)


def safe_environment(environ: Mapping[str, str], *, is_ours: bool = True) -> dict[str, str]:
    """Return an environment in which Python imports nothing from the current folder. Does not mutate.

    `is_ours`: the new process runs the same Python, and must import the quire that is running.

    >>> home = str(Path(__file__).resolve().parents[2])
    >>> safe_environment({"PYTHONPATH": f":.:src:{home}"}) == {"PYTHONPATH": home, "PYTHONSAFEPATH": "1"}
    True
    """
    entries = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(entry)]
    home = str(Path(__file__).resolve().parents[2])
    if is_ours and home not in map(os.path.realpath, (*entries, *site.getsitepackages(), site.getusersitepackages())):
        entries.append(home)
    safe = {name: value for name, value in environ.items() if name != "PYTHONPATH"} | {"PYTHONSAFEPATH": "1"}
    return safe | {"PYTHONPATH": os.pathsep.join(entries)} if entries else safe
