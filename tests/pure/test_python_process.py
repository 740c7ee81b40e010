"""Every Python process of ours is started in one way: see `quire.core.python_process`."""

from __future__ import annotations

import ast
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import quire
from quire.core import python_process
from quire.core.errors import ExecutionError
from quire.core.python_process import safe_environment, start_python

ROOT = Path(__file__).parents[2]
HOME = str(Path(quire.__file__).resolve().parents[1])
STARTERS = {  # that start no Python of ours
    "src/quire/core/python_process.py": {"subprocess.Popen", "sys.executable"},
    "src/quire/compute/torch/device.py": {"subprocess.run"},  # nvidia-smi
    "src/quire/reporting/machine.py": {"subprocess.run"},  # git
    "src/quire/instruments/bench/peer.py": {"subprocess.run"},  # the Python of the peer, which has a path of its own
    "src/quire/compute/grammar/mask_child.py": {"os.fork"},  # of a process that was started safely
    "src/quire/cli/doctor.py": {"sys.executable"},  # shows it
}
STARTING = {
    *(f"subprocess.{name}" for name in ("Popen", "run", "call", "check_call", "check_output", "getoutput")),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell", "sys.executable"),
    *("multiprocessing", "concurrent.futures.ProcessPoolExecutor", "pty.spawn"),
    *(f"os.{name}" for name in dir(os) if name.startswith(("exec", "spawn", "posix_spawn", "fork", "system", "popen"))),
}
LAST_NAMES = {name.rpartition(".")[2] for name in STARTING}


def uses(path: Path) -> Iterator[str]:
    """What a module uses of `STARTING`, by its names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in LAST_NAMES:
                yield ast.unparse(node.func)
        elif isinstance(node, ast.Attribute) and node.attr == "executable":
            yield ast.unparse(node)
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_nobody_starts_python_in_another_way() -> None:
    found = {}
    for path in sorted((ROOT / "src").rglob("*.py")):
        used = {name for name in uses(path) if name in STARTING}
        if used:
            found[path.relative_to(ROOT).as_posix()] = used
    assert found == STARTERS


def test_programs_beside_the_product_start_python_safely() -> None:
    """They are read as examples, so they say it themselves; a script that is run by its path has that folder first."""
    num_safe = 0
    for folder in ("examples", "scripts", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.List) and node.elts and ast.unparse(node.elts[0]) == "sys.executable":
                    assert ast.unparse(node.elts[1]) not in ("'-m'", "'-c'"), f"{path}:{node.lineno}"
                    num_safe += ast.unparse(node.elts[1]) == "'-P'"
    assert num_safe >= 4


def test_relative_entries_are_dropped() -> None:
    found = safe_environment({"PYTHONPATH": os.pathsep.join(["", ".", "src", "/opt/libraries", "", HOME]), "A": "b"})
    assert found == {"PYTHONPATH": os.pathsep.join(["/opt/libraries", HOME]), "PYTHONSAFEPATH": "1", "A": "b"}


def test_quire_is_found_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "getsitepackages", lambda: [])
    assert safe_environment({})["PYTHONPATH"] == HOME
    monkeypatch.setattr(site, "getsitepackages", lambda: [HOME])
    assert "PYTHONPATH" not in safe_environment({"PYTHONPATH": "."})  # site-packages would come before the library


def test_a_process_has_neither_the_current_folder_nor_relative_ones_on_its_path(tmp_path: Path) -> None:
    code = "import queue, quire, sys; print(*sys.path, quire.__file__, sep='\\n')"
    (tmp_path / "queue.py").write_text("raise SystemExit('the wrong one')")
    environ = {**os.environ, "PYTHONPATH": "."}
    with start_python("-c", code, cwd=tmp_path, environment=environ, stdout=subprocess.PIPE, text=True) as process:
        *entries, found = process.communicate(timeout=300)[0].splitlines()
    assert process.returncode == 0
    assert all(map(os.path.isabs, entries))
    assert str(tmp_path) not in entries
    assert Path(found).resolve() == Path(quire.__file__).resolve()


def test_a_copy_that_is_not_installed_finds_itself(tmp_path: Path) -> None:
    """`cd src; python -m quire`: the package stands in the current folder, and the process it starts must find it."""
    package = tmp_path / "quire"
    package.mkdir()
    (package / "core").mkdir()
    for path in ("__init__.py", "core/errors.py", "core/python_process.py"):
        shutil.copy(Path(quire.__file__).parent / path, package / path)
    (package / "core/__init__.py").touch()
    code = (
        "from quire.core.python_process import start_python\n"
        "raise SystemExit(start_python('-S', '-c', 'import quire; print(quire.__file__)').wait())"
    )
    command = [sys.executable, "-S", "-c", code]  # without site-packages
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (0, f"{package / '__init__.py'}\n"), done.stderr


def test_a_program_without_a_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_process.sys, "executable", "")
    with pytest.raises(ExecutionError, match=r"sys\.executable"):
        start_python("-c", "pass")


def test_another_python_is_given_neither_our_quire_nor_our_relative_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_process.sys, "executable", "")
    monkeypatch.setattr(python_process.subprocess, "Popen", lambda command, env: (command, env))
    started: object = start_python("-c", "pass", python="/opt/python", environment={"PYTHONPATH": ".:/x", "A": "b"})
    assert started == (
        ["/opt/python", "-P", "-c", "pass"],
        {"A": "b", "PYTHONPATH": "/x", "PYTHONSAFEPATH": "1"},
    )
