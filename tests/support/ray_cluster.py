"""The processes of a test run with Ray, known by their home, and streams of a server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from openai import OpenAI

from support.served_process import ServedProcess
from support.waiting import wait_until

NUM_STREAMS = 8
SETTINGS = ("--kv-memory", "16MiB", "--max-num-seqs", "8")


class ClusterHome:
    """The home folder of the processes of a test run: by it they are known."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def token(self) -> Path:
        return self.folder / ".ray" / "auth_token"

    def processes(self, what: str = "") -> list[int]:
        """The processes with this home whose command line contains a text, older ones first."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                environ = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ") if environ else b""
                if f"HOME={self.folder}".encode() in environ and what.encode() in command:
                    found.append(int(entry.name))
        return sorted(found)

    def end_all(self) -> None:
        """Kill what is left of them."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                if process != os.getpid():
                    os.kill(process, signal.SIGKILL)

    @staticmethod
    def parent(process: int) -> int:
        """The process that started another one."""
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])

    @property
    def relays(self) -> list[int]:
        return self.processes("ray::Relay")

    @property
    def engines(self) -> list[int]:
        return self.processes("engine_host")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command of quire, with its output in a file, which daemons may keep open."""
        with tempfile.TemporaryFile("w+") as output:
            command = [sys.executable, "-m", "quire", *arguments]
            status = subprocess.run(
                command, stdout=output, stderr=output, env=os.environ | variables, check=False, timeout=300
            ).returncode
            output.seek(0)
            return subprocess.CompletedProcess(command, status, output.read())


def text(server: ServedProcess, number: int, begun: threading.Semaphore | None = None) -> tuple[Any, ...]:
    """What a client of OpenAI is told: the text, how it ended, and the usage."""
    client = OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=300)
    pieces, ends, usage = [], [], None
    for event in client.completions.create(
        model="guide",
        prompt=f"{number}. A block table " * (1 + number % 3),
        max_tokens=1200,
        seed=number,
        temperature=0.9 if number % 2 else 0.0,
        frequency_penalty=0.2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        if begun is not None:
            begun.release()
            begun = None
        pieces += [choice.text for choice in event.choices]
        ends += [choice.finish_reason for choice in event.choices if choice.finish_reason]
        usage = event.usage or usage
    assert usage is not None
    return "".join(pieces), ends, usage.prompt_tokens, usage.completion_tokens


def metric(server: ServedProcess, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=300) as answer:
        told = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:\{{.*\}})? (\S+)$", told, re.MULTILINE))


def texts(server: ServedProcess, trouble: Callable[[], object] = lambda: None) -> list[Any]:
    """The texts of streams; there is trouble as soon as each has begun."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(text, server, number, begun) for number in range(NUM_STREAMS)]
        for _ in streams:
            assert begun.acquire(timeout=300)
        trouble()
        return [stream.result() for stream in streams]


def both_ready(server: ServedProcess) -> None:
    wait_until(lambda: metric(server, "quire_replica_ready") == 2)
