"""Runs in a separate process: gets a URL over and over until its input ends, and prints the time of each answer.

    python -m quire.instruments.torture.prober http://127.0.0.1:8000/livez

A thread in the process that offers the load would measure that process too.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys

from quire.core.python_process import start_python
from quire.instruments.http.plain import ask

EVERY_S = 0.05


def start_prober(url: str) -> subprocess.Popen[str]:
    """Start a process that gets a URL until its input is closed."""
    pipe = subprocess.PIPE
    return start_python("-m", "quire.instruments.torture.prober", url, stdin=pipe, stdout=pipe, text=True)


def main(url: str) -> None:
    """Get the URL until the input ends; print one line of JSON."""
    seconds = []
    while not select.select([sys.stdin], [], [], EVERY_S)[0]:
        answer = ask(url)
        if answer.status == 200:
            seconds.append(answer.seconds)
    print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
