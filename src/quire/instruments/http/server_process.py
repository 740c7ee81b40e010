"""ServerProcess: a `quire serve` process that starts and ends with a `with` block.

    with ServerProcess(config) as server:         started, listening, ready
        ask(f"{server.url}/v1/models")
                                                  SIGTERM, then killed if it does not end in time

The system chooses the port, and the server prints it, so two servers never conflict. The output goes to a file, not to
a pipe: a full pipe would stop the server.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError
from quire.core.python_process import start_python
from quire.instruments.http.plain import ask

LISTENING = re.compile(rb"listening on (http://\S+)")
LOOK_S = 0.02
PROCESSES = Path("/proc")


class ServerProcess:
    """A server for a model. `options`: options of `quire serve`; `environment`: added to this process's environment.

    `python`: the interpreter; by default this process's own. Another interpreter runs the quire installed with it.
    `folder`: the server's working directory; None: the current one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 300.0,
        python: str = "",
        folder: Path | None = None,
    ) -> None:
        self._arguments = ("-m", "quire", "serve", config.model, "--port", "0", *options)
        self._environment = {**os.environ, **engine_environment(config), **(environment or {})}
        self._start_timeout_s = start_timeout_s
        self._python = python
        self._folder = folder
        self.url = ""
        self.ready_s = 0.0  # from process start to ready

    def start(self) -> ServerProcess:
        """Start the server and wait until it is ready; raises `ExecutionError` if it never is. Mutates."""
        self._log = tempfile.TemporaryFile(prefix="quire-serve-")  # noqa: SIM115 (`stop` closes it)
        started = time.monotonic()
        self._process = start_python(
            *self._arguments,
            environment=self._environment,
            python=self._python,
            cwd=self._folder,
            stdout=self._log,
            stderr=self._log,
        )
        try:
            self.wait_for(self._is_ready, "ready", self._start_timeout_s)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - started
        return self

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask the server to stop, and kill it if it does not; return its exit status. Can be called twice. Mutates."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.send_signal(signal.SIGTERM)  # a second signal ends it at once
                try:
                    self._process.wait(5.0)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
        self._log.close()
        return self._process.returncode

    @property
    def pid(self) -> int:
        """The process id of the server's front."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """The exit status; None while the server runs."""
        return self._process.poll()

    def said(self) -> str:
        """Return the server's output so far."""
        return os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0).decode(errors="replace")

    def children(self) -> list[int]:
        """Return the server's child processes, and their children; empty if the system does not report them."""
        return list(_descendants(self.pid))

    def engines(self) -> list[int]:
        """Return the processes of engines, by number. Others, such as those that compute masks, are left out."""
        return [child for child in sorted(self.children()) if b"engine_host" in _command_line(child)]

    def metric(self, name: str, headers: Mapping[str, str] | None = None) -> float | None:
        """Return a number of /metrics, summed over its labels; None if there is none."""
        lines = ask(f"{self.url}/metrics", headers=headers).body.decode().splitlines()
        found = [line for line in lines if line.partition("{")[0].split(" ")[0] == name]
        return sum(float(line.rpartition(" ")[2]) for line in found) if found else None

    def resident_bytes(self) -> int | None:
        """Return the private memory of the server and its children; None if the system does not report it."""
        try:
            return sum(_anonymous_bytes(pid) for pid in [self.pid, *self.children()])
        except (OSError, ValueError):
            return None

    def processor_s(self) -> float | None:
        """Return the processor time of the front process, without the engine; None if the system does not report it."""
        try:
            ticks = (PROCESSES / str(self.pid) / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[11:13]
        except OSError:
            return None
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def wait_for(self, is_so: Callable[[], bool], what: str, timeout_s: float) -> None:
        """Wait until `is_so` returns True; raises `ExecutionError` if the server ends, or if it takes too long."""
        end = time.monotonic() + timeout_s
        while not is_so():
            if self._process.poll() is not None:
                *_, last = ["it printed nothing", *self.said().splitlines()]
                raise ExecutionError(f"the server has ended with status {self._process.returncode}: {last}")
            if time.monotonic() > end:
                raise ExecutionError(f"the server is not {what} after {timeout_s:.0f} s")
            time.sleep(LOOK_S)

    def __enter__(self) -> ServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _is_ready(self) -> bool:
        if not self.url:
            found = LISTENING.search(self.said().encode())
            self.url = found[1].decode() if found else ""
        try:
            return bool(self.url) and ask(f"{self.url}/readyz", timeout_s=5.0).status == 200
        except OSError:
            return False


def engine_environment(config: EngineConfig) -> dict[str, str]:
    """Return the settings of an engine, except its model, as environment variables.

    >>> engine_environment(EngineConfig(kv_memory="1MiB", touch_kv_memory="start"))["QUIRE_KV_MEMORY"]
    '1048576'
    """
    found = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, tuple):
            if value:
                found[f"QUIRE_{field.name.upper()}"] = ",".join(value)
        elif field.name != "model":
            text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
            found[f"QUIRE_{field.name.upper()}"] = text
    return found


def _descendants(pid: int) -> Iterator[int]:
    for path in (PROCESSES / str(pid) / "task").glob("*/children"):
        try:
            children = path.read_text(encoding="utf-8").split()
        except OSError:
            continue
        for child in map(int, children):
            yield child
            yield from _descendants(child)


def _command_line(pid: int) -> bytes:
    try:
        return (PROCESSES / str(pid) / "cmdline").read_bytes()
    except OSError:
        return b""


def _anonymous_bytes(pid: int) -> int:
    for line in (PROCESSES / str(pid) / "status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError("the system does not report memory")
