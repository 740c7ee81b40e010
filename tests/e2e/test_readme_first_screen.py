"""The first screen of the README, run as it is printed; only what installs is left out, and the port is a free one."""

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


def programs(folder: Path) -> str:
    """Return where the shell finds quire, and curl on a machine that has none."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    if shutil.which("curl") is None:
        (folder / "curl").write_text(f'#!/bin/sh\nexec {sys.executable} {CURL} "$@"\n')
        (folder / "curl").chmod(0o755)
        paths.append(str(folder))
    return ":".join(paths)


def test_the_first_lines_install_chat_serve_call_and_stop(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = text.partition("```sh\n")[2].partition("```")[0]
    assert len(block.splitlines()) <= 10
    assert text[: text.index(block)].count("\n") < 20
    lines = block.replace("\\\n", "").splitlines()
    installs = [line for line in lines if re.match(r"python3|pip", line)]
    assert [line.partition("#")[0].split()[:2] for line in installs[1:]] == [["pip", "install"]] * 2
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    look = f"curl --silent --fail http://127.0.0.1:{port}/readyz"
    wait = f"until {look} || ! kill -0 %1; do sleep 0.1; done; echo; echo ANSWER"
    script = []
    for line in lines:
        if line in installs:
            continue
        if line.startswith("curl"):
            script.append(wait)
        script.append(line.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    script.append("wait")
    found = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    done = subprocess.run(
        ["bash", "-m", "-c", "\n".join(script)],
        env=found | {"PATH": programs(tmp_path), "QUIRE_PORT": str(port)},
        input="",
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "smollm2" in done.stdout and f"http://127.0.0.1:{port}/" in done.stdout
    answer = json.loads(done.stdout.partition("ANSWER\n")[2].splitlines()[0])
    assert answer["choices"][0]["message"]["content"]
