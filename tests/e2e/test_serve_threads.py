"""Long texts and the threads that they take: of other tenants, of the engine's process, and of the end of the server.

The tokenizer of these servers works on a text for an hour, so what waits for it is never there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.engine.text.tokenizer import Tokenizer
from support.server import RunningServer, running_server
from support.server_thread import Answer
from support.waiting import wait_until

LONG = "A long text. " * 1000
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": 64},
    "/tokenize": {"prompt": LONG},
}
SHORT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "truncate_prompt_tokens": 64,
        "max_tokens": 2,
    },
    "/tokenize": {"prompt": "Hi"},
}
SLOW_SERVER = """
import sys, time
from quire import cli
from quire.engine.text.tokenizer import Tokenizer

def slow(self, *args, **kwargs):
    time.sleep(3600)

Tokenizer.encode = Tokenizer.encode_chat = slow
sys.exit(cli.main(["serve", "guide", "--port", "0", "--kv-memory", "8MiB", "--num-threads", "1", *sys.argv[1:]]))
"""


def post(port: int, path: str, fields: dict[str, Any], key: str = "none") -> socket.socket:
    """Send a call; its answer is not waited for."""
    body = json.dumps({"model": "guide", **fields}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", port), timeout=60)
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return connection


def answer_to(server: RunningServer, path: str, fields: dict[str, Any], key: str) -> Answer:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    return server.ask("POST", path, json.dumps(fields).encode(), headers)


# ---- other tenants --------------------------------------------------------------------------------------------------


class SlowTexts:
    """Holds up the work on long texts, and counts it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.leave = threading.Event()
        self.num_begun = 0
        for name in ("encode", "encode_chat"):
            monkeypatch.setattr(Tokenizer, name, self._slow(getattr(Tokenizer, name)))

    def _slow(self, work: Any) -> Any:
        def slow(tokenizer: Tokenizer, value: Any, *others: Any, **options: Any) -> Any:
            if len(str(value)) >= len(LONG):
                self.num_begun += 1
                assert self.leave.wait(60)
            return work(tokenizer, value, *others, **options)

        return slow


@pytest.fixture
def slow_texts(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowTexts]:
    slow = SlowTexts(monkeypatch)
    yield slow
    slow.leave.set()


@pytest.fixture
def server(slow_texts: SlowTexts) -> Iterator[RunningServer]:
    with running_server(settings={"policy": "fair_share"}, api_key=("alice", "bob")) as running:
        yield running
        slow_texts.leave.set()


@pytest.mark.parametrize("path", BODIES)
def test_long_texts_of_clients_that_leave_hold_up_nobody(
    server: RunningServer, slow_texts: SlowTexts, path: str
) -> None:
    pool = server.llm.text_pool
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(post(server.port, path, BODIES[path], "alice"))
        wait_until(lambda: (slow_texts.num_begun, pool.num_waiting) == (1, 7))
        for key in ("bob", "alice"):  # short texts wait for no thread
            assert answer_to(server, path, SHORT[path], key).status == 200
    wait_until(lambda: pool.num_waiting == 0)
    wait_until(lambda: server.call(lambda: server.services.gate.num_visits) == 0)
    slow_texts.leave.set()
    wait_until(lambda: pool.num_running == 0)
    assert slow_texts.num_begun == 1
    server.check()


def test_a_long_text_of_another_tenant_has_a_thread(server: RunningServer, slow_texts: SlowTexts) -> None:
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(post(server.port, "/tokenize", BODIES["/tokenize"], "alice"))
        wait_until(lambda: slow_texts.num_begun == 1)
        stack.enter_context(post(server.port, "/tokenize", BODIES["/tokenize"], "bob"))
        wait_until(lambda: slow_texts.num_begun == 2)


def test_a_call_is_let_in_before_its_text_is_worked_on(slow_texts: SlowTexts) -> None:
    with running_server(max_queued_sequences=1) as server, ExitStack() as stack:
        gate = server.services.gate
        stack.enter_context(post(server.port, "/v1/completions", BODIES["/v1/completions"]))
        wait_until(lambda: slow_texts.num_begun == 1)
        assert server.call(lambda: gate.num_waiting_sequences) == 1
        assert 0 < server.call(lambda: gate.num_waiting_tokens) <= server.llm.limits.max_model_len
        answer = server.post("/v1/completions", {"prompt": LONG})
        assert (answer.status, answer.error["code"]) == (503, "server_is_overloaded")
        assert slow_texts.num_begun == 1
        slow_texts.leave.set()


def test_a_call_counts_as_many_sequences_as_it_wants() -> None:
    with running_server(api_key=("alice", "bob"), max_sequences_per_key=8) as server, ExitStack() as stack:
        endless = {"max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 1}
        calls = [{"prompt": ["a", "b"], "n": 2}, {"prompt": "c", "n": 1, "best_of": 3, "stream": False}]
        for fields in calls:
            stack.enter_context(post(server.port, "/v1/completions", endless | fields, "alice"))
        wait_until(lambda: server.call(lambda: server.services.gate.num_sequences) == 4 + 3)
        wanted = {"prompt": "d", "max_tokens": 1, "temperature": 1}
        answer = answer_to(server, "/v1/completions", wanted | {"n": 2}, "alice")
        assert (answer.status, answer.error["code"]) == (429, "slow_down")
        assert answer_to(server, "/v1/completions", wanted, "alice").status == 200
        assert answer_to(server, "/v1/completions", wanted | {"n": 8}, "bob").status == 200


# ---- the engine's process, and the end ------------------------------------------------------------------------------


class SlowServer:
    """A server in a process of its own, with six calls in the hands of its tokenizer."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self.process = process
        self._errors = errors
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("listening on"):
                self.port = int(line.rpartition(":")[2])
            elif line.startswith("ready"):
                return
        raise AssertionError(self.errors)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def call_all(self) -> list[socket.socket]:
        return [post(self.port, path, BODIES[path]) for path in [*BODIES, *BODIES] for _ in range(3)]

    def engines(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in children for pid in path.read_text().split()]


@contextmanager
def slow_server(folder: Path, *options: str) -> Iterator[SlowServer]:
    errors = folder / "errors"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    command = [sys.executable, "-c", SLOW_SERVER, *options]
    with (
        errors.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ) as process,
    ):
        try:
            yield SlowServer(process, errors)
        finally:
            process.kill()


@pytest.mark.parametrize("stays", [False, True])
def test_a_server_ends_in_its_time_beside_texts_that_take_for_ever(tmp_path: Path, stays: bool) -> None:
    """Before that, an engine that is killed is started again beside them."""
    with slow_server(tmp_path, "--drain-timeout-s", "0.5") as server, ExitStack() as stack:
        for connection in server.call_all():
            stack.enter_context(connection)
        time.sleep(0.5)  # the texts have their threads
        if stays:
            [engine] = server.engines()
            os.kill(engine, signal.SIGKILL)
            wait_until(lambda: server.engines() not in ([], [engine]))
        else:
            stack.close()
        server.process.terminate()
        assert server.process.wait(60) == 0, server.errors
        assert "texts" in server.errors


@pytest.mark.parametrize(
    ("hang", "status"), [("time.sleep(3600)", 1), ("re.match('(a+)+b', 'a' * 64)", -signal.SIGALRM)]
)
def test_a_process_ends_whatever_its_threads_do(hang: str, status: int) -> None:
    """The second one never lets go of Python's lock, so no other thread runs."""
    program = f"import re, time, logging; from quire.serve.server import end_at_latest; end_at_latest(0.5); {hang}"
    done = subprocess.run([sys.executable, "-c", program], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == status
    if status == 1:
        assert "did not end within 0.5 s" in done.stderr
