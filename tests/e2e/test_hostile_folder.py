"""Nothing is imported from the current folder, where a model from a stranger may lie."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire.guide import GUIDE_FOLDER

QUIRE = str(Path(sys.executable).with_name("quire"))
NAMES = ("queue", "json", "numpy", "quire", "socket", "msgspec", "llguidance", "sitecustomize", "logging")
QUICK = ("--kv-memory", "4MiB", "--num-threads", "1")
GRAMMAR = """
from quire import LLM, Grammar, SamplingParams
with LLM("guide", kv_memory="4MiB", num_threads=1) as llm:
    sampling = SamplingParams(max_tokens=4, grammar=Grammar("regex", "[ab]+"))
    print(llm.generate("a", sampling, use_tqdm=False)[0].outputs[0].text)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A model folder with modules that write their names down when they are imported."""
    folder = tmp_path / "model"
    shutil.copytree(GUIDE_FOLDER, folder)
    for name in NAMES:
        code = f"with open({str(tmp_path / 'imported')!r}, 'a') as file: print({name!r}, file=file)\n"
        (folder / f"{name}.py").write_text(f"{code}raise ImportError('the wrong {name}')\n")
    return folder


def require_untouched(folder: Path) -> None:
    path = folder.parent / "imported"
    assert not path.exists(), path.read_text()


@pytest.mark.parametrize("search_path", [None, f".:{os.curdir}/::model"])
def test_a_server_started_there_imports_nothing_of_it(hostile: Path, search_path: str | None) -> None:
    """The server itself is started safely here: with a PYTHONPATH like these it is Python that imports from there."""
    environ = {**os.environ, "PYTHONPATH": search_path} if search_path else dict(os.environ)
    code = "import os, sys; sys.path[:] = [e for e in sys.path if e != os.getcwd()]; from quire.cli import main; main()"
    if search_path:  # else the program would be the one that is taken in
        (hostile / "sitecustomize.py").unlink()
    with subprocess.Popen(
        [sys.executable, "-P", "-c", code, "serve", ".", "--port", "0", *QUICK],
        cwd=hostile,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready after"):
                break
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 0, "".join(lines)
    require_untouched(hostile)


@pytest.mark.parametrize(
    "command",
    [
        (QUIRE, "doctor", "."),
        (QUIRE, "generate", ".", "-p", "A block", "--max-tokens", "2", *QUICK),
        (QUIRE, "chat", ".", *QUICK),
        (QUIRE, "config", "show"),
        (QUIRE, "plan", ".", "--memory", "1GiB", "--hardware", "zen5-2-cores"),
        (sys.executable, "-P", "-c", GRAMMAR),
    ],
)
def test_commands_run_there_import_nothing_of_it(hostile: Path, command: tuple[str, ...]) -> None:
    done = subprocess.run(command, cwd=hostile, input="", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    require_untouched(hostile)


def test_python_m_quire_drops_the_current_folder(hostile: Path) -> None:
    """What Python imports before our first line it takes from the current folder: the package itself, and `typing`."""
    (hostile / "quire.py").unlink()
    command = [sys.executable, "-m", "quire", "generate", ".", "-p", "A block", "--max-tokens", "2", *QUICK]
    done = subprocess.run(command, cwd=hostile, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    require_untouched(hostile)
