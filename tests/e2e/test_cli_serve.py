"""`quire serve` from outside: what it prints, how it starts, and how it ends."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from quire import cli

QUIRE = [sys.executable, "-m", "quire"]
QUICK = ("guide", "--port", "0", "--kv-memory", "8MiB", "--num-threads", "1")
SECRET_WORDS = "the secret of the prompt"


def environment(**variables: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")} | variables


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], lines: list[str], errors: Path) -> None:
        self.process = process
        self.lines = lines
        self._errors = errors
        match = re.search(r"^listening on http://127\.0\.0\.1:(\d+)$", "".join(lines), re.MULTILINE)
        assert match
        self.port = int(match[1])

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @contextmanager
    def call(self, method: str, path: str, value: Any = None) -> Iterator[http.client.HTTPResponse]:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)) as connection:
            body = None if value is None else json.dumps(value)
            connection.request(method, path, body, {"Content-Type": "application/json"})
            yield connection.getresponse()

    def status(self, path: str) -> int:
        with self.call("GET", path) as response:
            response.read()
            return response.status

    def wait_ready(self) -> None:
        end = time.monotonic() + 3000
        while self.status("/readyz") != 200:
            assert time.monotonic() < end, self.errors
            time.sleep(0.02)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path) as server:
        yield server


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[Served]:
    errors = folder / "stderr"
    with (
        errors.open("w") as stderr,
        subprocess.Popen(
            [*QUIRE, "serve", *QUICK, *arguments],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=environment(PYTHONUTF8="1"),
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield Served(process, list(until_listening(process.stdout)), errors)
        finally:
            process.kill()


def until_listening(stdout: IO[str]) -> Iterator[str]:
    for line in stdout:
        yield line
        if line.startswith("listening"):
            return


def test_it_prints_the_table_where_it_listens_when_it_is_ready_and_how_to_call_it(served: Served) -> None:
    assert served.lines[0].startswith("model ")
    assert any("KV blocks" in line for line in served.lines)
    assert served.lines[-1].startswith("listening on http://127.0.0.1:")
    assert served.status("/livez") == 200
    assert served.process.stdout is not None
    assert re.fullmatch(r"ready after \d+\.\d\d s\n", served.process.stdout.readline())
    assert served.status("/readyz") == 200
    lines = [served.process.stdout.readline() for _ in range(7)]
    address = served.lines[-1].removeprefix("listening on ").strip()
    assert lines[0] == f"dashboard   {address}/\n"
    call = "".join(lines[1:3]).removeprefix("terminal").strip()
    if shutil.which("curl"):
        done = subprocess.run(["bash", "-c", f"{call} --silent"], capture_output=True, check=True, timeout=300)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert served.process.stdout.readline().startswith("stop        Ctrl-C")
    program = "".join(line[12:] for line in lines[3:])
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, check=False)
    if found.returncode:  # only where the client is not installed
        assert b"No module named 'openai'" in found.stderr
    else:
        assert found.stdout.strip()


def test_no_prompt_is_in_the_log_and_a_running_stream_ends_before_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "--log-format", "json") as server:
        server.wait_ready()
        request = {"model": "guide", "prompt": SECRET_WORDS, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        with server.call("POST", "/v1/completions", request) as response:
            answer = json.loads(response.read())
        assert answer["usage"]["completion_tokens"] == 5
        request |= {"max_tokens": 300, "stream": True}
        with server.call("POST", "/v1/completions", request) as response:
            assert response.readline().startswith(b"data: ")
            server.process.terminate()
            seen = []
            end = time.monotonic() + 300
            while 503 not in seen and server.process.poll() is None and time.monotonic() < end:
                try:
                    seen.append(server.status("/readyz"))
                except OSError:
                    break
            events = [line for line in response.read().splitlines() if line]
        assert events[-1] == b"data: [DONE]"
        assert b'"finish_reason":"length"' in events[-2]
        assert set(seen) <= {200, 503}
        assert server.process.wait(300) == 0
        records = [json.loads(line) for line in server.errors.splitlines()]
    calls = [record for record in records if record.get("path") == "/v1/completions"]
    for call, num_tokens in zip(calls, (5, 300), strict=True):
        assert (call["status"], call["output_tokens"], call["finish"]) == (200, num_tokens, "length")
        assert call["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert SECRET_WORDS not in server.errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_is_being_loaded_ends_it_in_order(number: signal.Signals, tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        server.process.send_signal(number)
        assert server.process.wait(300) == 0
        lines = server.errors.splitlines()
        assert all(" INFO quire.serve " in line for line in lines)
        assert any(line.endswith(" stopping: no request is running") for line in lines)  # it can be loaded by then


def test_a_second_signal_ends_it_at_once(served: Served) -> None:
    served.wait_ready()
    request = {"prompt": "A block", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with served.call("POST", "/v1/completions", request) as response:
        assert response.readline().startswith(b"data: ")
        served.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(300) == 130


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "70000"), "port is 70000"),
        (("--kv-memory", "lots"), "kv_memory is 'lots'"),
        (("--api-keys-file", "none.yaml"), "api_keys_file is 'none.yaml'"),
        (("--host", "no.such.host.invalid"), "host is 'no.such.host.invalid'"),
        (("--max-model-len", "100000"), "max_model_len is 100000"),
    ],
)
def test_a_wrong_setting_is_one_line_and_status_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", *QUICK, *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_port_that_is_taken_is_one_line_and_status_2() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        command = [*QUIRE, "serve", *QUICK, "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, check=False)
    assert done.returncode == 2
    assert (
        done.stderr == f"quire: error: port is {port}; allowed: a port that no other program uses; 0: any free port\n"
    )
    assert done.stdout == ""
