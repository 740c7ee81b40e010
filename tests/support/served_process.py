"""A whole server in a process of its own, to be killed."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from quire.core.failpoints import FAILPOINTS_VARIABLE


class ServedProcess:
    """Ways to ask a server, and to kill it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process = process
        self.port = port

    def complete(self, fields: Mapping[str, Any], key: str = "none") -> dict[str, Any]:
        """Return the answer to a completion that is asked for with a key."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            connection.request("POST", "/v1/completions", json.dumps(fields), headers)
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def try_to_complete(self, fields: Mapping[str, Any]) -> None:
        """Ask for a completion, and do not mind if the server is killed meanwhile."""
        with suppress(OSError, http.client.HTTPException, ValueError):
            self.complete(fields)

    def wait_ready(self) -> None:
        """Wait until the model is loaded."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
                connection.request("GET", "/readyz")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.02)
        raise AssertionError("the model is not loaded after 300 s")

    @property
    def engines(self) -> list[int]:
        """The processes of its engines, in the order in which they were started."""
        process = self.process.pid
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return sorted(int(child) for child in children if b"engine_host" in Path(f"/proc/{child}/cmdline").read_bytes())

    def wait_stored(self, num_blocks: int) -> None:
        """Wait until the disk cache has stored so many blocks: it writes behind the answers."""
        end = time.monotonic() + 300
        while time.monotonic() < end:
            with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
                connection.request("GET", "/metrics")
                text = connection.getresponse().read().decode()
            stored = re.search(r'^quire_disk_blocks_total\{.*"stored".*\} (\d+)', text, re.MULTILINE)
            if stored and int(stored[1]) >= num_blocks:
                return
            time.sleep(0.02)
        raise AssertionError(f"fewer than {num_blocks} blocks are stored after 300 s")

    def kill(self) -> None:
        """Kill the server and its engine, as `kill -9` does, and wait for the end."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@contextmanager
def served_process(
    folder: Path, *arguments: str, failpoints: str = "", model: str = "guide"
) -> Iterator[ServedProcess]:
    """Start `quire serve` with a model and these arguments in a group of its own, and wait until it can answer."""
    command = [sys.executable, "-m", "quire", "serve", model, "--port", "0", "--num-threads", "1", *arguments]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    if failpoints:
        variables[FAILPOINTS_VARIABLE] = failpoints
    with (
        (folder / "stderr").open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        port = next((match[1] for line in process.stdout if (match := re.match(r"listening on .*:(\d+)$", line))), None)
        assert port is not None, (folder / "stderr").read_text()
        server = ServedProcess(process, int(port))
        try:
            server.wait_ready()
            yield server
        finally:
            server.kill()
