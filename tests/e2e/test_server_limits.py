"""A server whose log nobody reads, and one that may open few files."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import math
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from quire.core.clock import SystemClock
from quire.serve.app import make_app
from quire.serve.config import ServerConfig
from quire.serve.connections import OTHER_FILES, UNCOUNTED
from quire.serve.server import Server, listen, run_server
from support.bare_server import ROUTES, FakeModel
from support.only_model import only_model
from support.server import running_server

QUIRE = (sys.executable, "-m", "quire", "serve")
QUICK = ("guide", "--port", "0", "--kv-memory", "8MiB", "--num-threads", "1")
NUM_CONNECTIONS = 40
MAX_FILES = NUM_CONNECTIONS + UNCOUNTED + OTHER_FILES


class Served:
    """A server, and ways to ask it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def call(self, path: str, value: Any = None) -> tuple[int, bytes]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            if value is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(value), {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()

    def complete(self, **fields: Any) -> int:
        return self.call("/v1/completions", {"model": "guide", "prompt": [5, 6], "max_tokens": 3, **fields})[0]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=300)


@contextmanager
def serving(stderr: int, *arguments: str, max_files: int = 1024, **variables: str) -> Iterator[Served]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")} | variables
    command = ["bash", "-c", f'ulimit -n {max_files}; exec "$@"', "bash", *QUIRE, *QUICK, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environ) as process:
        try:
            port = 0
            assert process.stdout is not None
            for line in process.stdout:
                found = re.search(rb"listening on http://127\.0\.0\.1:(\d+)", line)
                port = int(found[1]) if found else port
                if line.startswith(b"ready"):
                    break
            yield Served(process, port)
        finally:
            process.kill()


def test_a_log_that_nobody_reads_stops_neither_the_server_nor_its_engine() -> None:
    with serving(subprocess.PIPE, QUIRE_FAILPOINTS="error:token=77") as server:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
            for number in range(600):  # a line of 200 bytes for each: the pipe is full after half of them
                connection.request("GET", f"/{number}/{'x' * 100}")
                assert connection.getresponse().read()
        for _ in range(20):
            assert server.complete(prompt=[5, 77]) == 500  # the engine writes a line for it
            assert server.complete() == 200
        assert server.call("/readyz")[0] == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(300) == 0


def test_stdout_that_nobody_reads_is_no_different() -> None:
    """Both at once, as under `2>&1 | something that stands still`."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    command = [*QUIRE, *QUICK, "--port", str(port)]
    with subprocess.Popen(command, stdout=writing, stderr=writing) as process:
        try:
            server = Served(process, port)
            end = time.monotonic() + 300
            while not _is_ready(server):
                assert time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(300) == 0
        finally:
            process.kill()
            os.close(reading)
            os.close(writing)


def _is_ready(server: Served) -> bool:
    try:
        return server.call("/readyz")[0] == 200
    except OSError:
        return False


def test_connections_stop_short_of_the_limit_of_open_files() -> None:
    with serving(subprocess.PIPE, max_files=MAX_FILES) as server, ExitStack() as stack:
        for _ in range(3 * MAX_FILES):
            stack.enter_context(server.connect())
        end = time.monotonic() + 300
        while server.call("/readyz")[0] != 200:  # those who say nothing for a second make room for one who asks
            assert time.monotonic() < end
            time.sleep(0.1)
        assert server.complete() == 200
        assert len(os.listdir(f"/proc/{server.process.pid}/fd")) < MAX_FILES
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        log = server.process.stderr.read().decode()
    assert f"at most {NUM_CONNECTIONS} connections, not 4096: the limit of open files is {MAX_FILES}" in log
    assert "out of system resource" not in log
    assert log.count("\n") < 40, log


def test_connections_in_use_are_not_closed_for_new_ones() -> None:
    body = {"model": "guide", "prompt": [5, 6], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    request = json.dumps(body).encode()
    fields = ("host: localhost", "content-type: application/json", f"content-length: {len(request)}")
    head = "".join(f"{line}\r\n" for line in ("POST /v1/completions HTTP/1.1", *fields, ""))
    with running_server(max_connections=2) as server, ExitStack() as stack:
        for _ in range(2):
            stream = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=300))
            stream.sendall(head.encode() + request)
            assert b"200 OK" in stream.recv(100)
        answer = server.get("/livez")
        assert (answer.status, answer.error["code"]) == (503, "too_many_connections")


def test_a_server_that_can_open_no_more_files_says_so_now_and_then() -> None:
    """The limit falls below what is open already, so that nothing can be accepted at all."""
    with serving(subprocess.PIPE) as server, ExitStack() as stack:
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, 3))
        for _ in range(200):
            stack.enter_context(server.connect())
        time.sleep(4)  # the event loop tries again once a second, for each connection that waits
        server.process.kill()
        assert server.process.stderr is not None
        log = server.process.stderr.read().decode()
    assert log.count("out of system resource") == 1, log
    assert log.count("\n") < 20, log


def test_a_limit_that_serves_nobody_is_one_line_and_status_2() -> None:
    command = ["bash", "-c", 'ulimit -n 100; exec "$@"', "bash", *QUIRE, *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "quire: error: limit of open files is 100; allowed: 160 or more: ulimit -n 4096\n"


def test_a_server_seldom_looks_at_old_objects_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def ended(work: Any) -> None:
        work.close()
        seen.append((gc.get_freeze_count(), gc.get_threshold()))

    thresholds, turn_s = gc.get_threshold(), sys.getswitchinterval()
    monkeypatch.setattr(asyncio, "run", ended)
    try:
        run_server(only_model(FakeModel(), ServerConfig(port=0), SystemClock()), lambda _: None)
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(turn_s)
    [(num_frozen, found)] = seen
    assert num_frozen > 10_000
    assert math.prod(found) >= 1_000_000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_order_from_the_line_on_that_says_that_it_listens(number: signal.Signals) -> None:
    models = only_model(FakeModel(), ServerConfig(port=0), SystemClock())

    def announce(text: str) -> None:
        if text.startswith("listening"):
            os.kill(os.getpid(), number)

    missed: list[int] = []
    before = signal.signal(number, lambda received, _: missed.append(received))
    try:
        with closing(listen("127.0.0.1", 0)) as listener:
            server = Server(models, make_app(models, ROUTES), announce)
            asyncio.run(asyncio.wait_for(server.run(listener), 300))
    finally:
        signal.signal(number, before)
    assert not missed
    assert not server.was_forced
