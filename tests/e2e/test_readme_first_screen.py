"""The scripts of the README, run as they are printed; only what installs is left out, and the port is a free one."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CURL = ROOT / "tests/support/curl.py"
INSTALLS = re.compile("python3|pip")


def programs(folder: Path) -> str:
    """Return where the shell finds quire, and curl on a machine that has none."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if shutil.which("curl") is None:
        (folder / "curl").write_text(f'#!/bin/sh\nexec {sys.executable} {CURL} "$@"\n')
        (folder / "curl").chmod(0o755)
        paths.append(str(folder))
    return ":".join(paths)


def blocks() -> list[str]:
    """Return the shell scripts of the README; those that start a server are run here, and there are no others."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [part.partition("```")[0] for part in text.split("```sh\n")[1:]]


def run_block(block: str, folder: Path) -> str:
    """Run a script in a folder that stands for a clone; return what it prints. Its server is stopped at the end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    lines = [line for line in block.splitlines() if not INSTALLS.match(line)]
    script = "\n".join([*lines, "status=$?", "kill %1 2>/dev/null", "wait", "exit $status"])
    script = script.replace("127.0.0.1:8000", f"127.0.0.1:{port}").replace("--retry 30 ", "--retry 300 ")  # may be busy
    (folder / ".venv").mkdir()
    (folder / ".venv" / "bin").symlink_to(Path(sys.executable).parent)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    done = subprocess.run(
        ["bash", "-m", "-c", script],
        env=kept | {"PATH": programs(folder), "QUIRE_PORT": str(port), "QUIRE_TOUCH_KV_MEMORY": "use"},
        input="",
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"http://127.0.0.1:{port}/" in done.stdout
    return done.stdout


def test_the_first_lines_install_chat_serve_call_and_stop(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = blocks()
    assert len(block.splitlines()) <= 10
    assert text[: text.index(block)].count("\n") < 20
    installs = [line for line in block.splitlines() if INSTALLS.match(line)]
    assert [line.partition("#")[0].split()[:2] for line in installs[1:]] == [["pip", "install"]] * 2
    shown = run_block(block, tmp_path)
    answer = json.loads(next(line for line in shown.splitlines() if line.startswith('{"id"')))
    assert answer["model"] == "smollm2" and answer["choices"][0]["message"]["content"]


def test_make_keeps_an_environment_that_works(tmp_path: Path) -> None:
    """README makes one and installs a model in it; then `make demo` removed both, and a running server's files."""
    environment, fresh = tmp_path / "venv", tmp_path / "python"
    python = environment / "bin" / "python"
    fresh.write_text('#!/bin/sh\nmkdir -p "$3"\n')  # called with -m venv FOLDER
    python.parent.mkdir(parents=True)
    for works in (True, False):
        python.write_text(f"#!/bin/sh\nexit {0 if works else 1}\n")
        for file in (python, fresh):
            file.chmod(0o755)
        command = ["make", f"VENV={environment}", f"PYTHON={fresh}", f"{environment}/.created"]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        assert python.exists() is works
        (environment / ".created").unlink()
