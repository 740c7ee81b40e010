"""Faults that end nothing: a frozen engine, shadowed modules, no more files, a log that is never read."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from contextlib import ExitStack, closing
from dataclasses import replace

from quire.core.python_process import run_python, start_python
from quire.instruments.http.plain import ask
from quire.instruments.http.server_process import ServerProcess
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.process_faults import engine_process
from quire.instruments.torture.stage import PLAIN, ServerSpec, Stage, wait_until

NOT_READY_S = 10.0
BACK_S = 60.0
SLEEP_S, MAX_SILENCE_S, MAX_STEP_S = 6, 5, 9
MODULES = ("queue", "json", "numpy", "quire", "socket", "logging", "msgspec", "sitecustomize")
MAX_CONNECTIONS = 64
NUM_CALLS = 1000
"""Enough calls to fill a pipe of 64 KiB: each logs a line of more than 100 bytes."""


def engine_stopped(stage: Stage) -> str:
    """F17: the engine freezes while idle; readiness reports it, and the engine continues or is restarted."""
    with stage.serving(ServerSpec.of({"QUIRE_MAX_SILENCE_S": "8"}, max_num_seqs=28)) as server:
        server.may_lose_bystanders = True
        engine = engine_process(server.process)
        os.kill(engine, signal.SIGSTOP)
        noticed_s = wait_until(lambda: not server.is_ready(), "reporting that it is not ready", NOT_READY_S)
        os.kill(engine, signal.SIGCONT)
        wait_until(server.is_ready, "ready again", NOT_READY_S)
        require(engine_process(server.process) == engine, "an engine that continued was restarted")
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: not server.is_ready(), "reporting that it is not ready", NOT_READY_S)
        back = wait_until(server.is_ready, "back", BACK_S)
        require(engine_process(server.process) != engine, "the engine's process is the old one")
        require(server.complete().status == 200, "the new engine does not serve")
    return f"not ready after {noticed_s:.1f} s, restarted and ready after {back:.1f} s"


def idle_then_busy(stage: Stage) -> str:
    """F18: the engine idles for longer than the silence limit, then a step takes that long; then one never ends."""
    token, endless = 1999, 1998
    variables = {
        "QUIRE_MAX_SILENCE_S": str(MAX_SILENCE_S),
        "QUIRE_MAX_STEP_S": str(MAX_STEP_S),
        "QUIRE_FAILPOINTS": f"sleep{SLEEP_S}:token={token},sleep3600:token={endless}",
    }
    with stage.serving(), ServerProcess(PLAIN.config, environment=variables) as process:
        engine = engine_process(process)
        time.sleep(SLEEP_S)
        require(_complete(process.url, token) == 200, "a long step after an idle time was not served")
        require(engine_process(process) == engine, "a healthy engine was restarted")
        began = time.monotonic()
        require(_complete(process.url, endless) in (500, 503), "an endless step was not ended")
        ended_s = time.monotonic() - began
        wait_until(lambda: ask(f"{process.url}/readyz").status == 200, "back", BACK_S)
        require(engine_process(process) != engine, "the engine's process is the old one")
        require(_complete(process.url, 5) == 200, "the new engine does not serve")
    return f"a step of {SLEEP_S} s was served, one of an hour ended after {ended_s:.1f} s"


def modules_in_the_folder(stage: Stage) -> str:
    """F19: the model folder is the current folder and has a queue.py, a json.py …: none of these must run."""
    from quire.guide import GUIDE_FOLDER

    folder, marks = stage.folder / "modules", stage.folder / "imported"
    shutil.copytree(GUIDE_FOLDER, folder)
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(marks)!r}, 'a').write({name!r} + ' ')\n", encoding="utf-8")
    grammar = {"response_format": {"type": "json_object"}}
    with stage.serving(), ServerProcess(replace(PLAIN.config, model="."), folder=folder) as process:
        require(_complete(process.url, 5, **grammar) == 200, "a server that was started there does not serve")
        for arguments in (("doctor", "."), ("generate", ".", "-p", "A block", "--max-tokens", "2")):
            ended = run_python("-m", "quire", *arguments, folder=folder)
            require(ended.returncode == 0, f"{arguments[0]} ended with {ended.returncode}: {ended.stderr[-200:]!r}")
    require(not marks.exists(), f"these were run: {marks.read_text() if marks.exists() else ''}")
    return f"{len(MODULES)} modules, none ran"


def no_more_files(stage: Stage) -> str:
    """F20: connections up to the limit, then no free files: probes are still answered, and the log stays short."""
    with stage.serving(ServerSpec.of({"QUIRE_MAX_CONNECTIONS": str(MAX_CONNECTIONS)})) as server, ExitStack() as stack:
        server.may_lose_bystanders = True
        for _ in range(4 * MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(server.address, timeout=30.0))
        waited = wait_until(server.is_ready, "ready with idle connections", NOT_READY_S)
        num_lines = server.process.said().count("\n")
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, hard))
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(socket.create_connection(server.address, timeout=30.0))
        time.sleep(3.0)
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
        log = server.process.said()
        wait_until(server.is_ready, "ready once files can be opened", NOT_READY_S)
        require("out of system resource" in log, "the log does not report that no file can be opened")
        require(log.count("out of system resource") == 1, "the log reports it repeatedly")
        num_lines = log.count("\n") - num_lines
    return f"ready with {4 * MAX_CONNECTIONS} idle connections after {waited:.1f} s; {num_lines} lines of log"


def unread_log(stage: Stage) -> str:
    """F21: the server's stdout and stderr are not read: it keeps serving, and stops on SIGTERM."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    url, arguments = f"http://127.0.0.1:{port}", ("--port", str(port), "--kv-memory", "8MiB", "--num-threads", "1")
    pipe = subprocess.PIPE
    with (
        stage.serving(),
        start_python("-m", "quire", "serve", "guide", *arguments, stdout=pipe, stderr=pipe) as process,
    ):
        try:
            wait_until(lambda: ask(f"{url}/readyz").status == 200, "ready", BACK_S)
            for number in range(NUM_CALLS):
                require(ask(f"{url}/nothing/{number}").status == 404, "an unknown path did not get 404")
            require(_complete(url, 5) == 200, "the server does not serve")
            process.send_signal(signal.SIGTERM)
            ended = wait_until(lambda: process.poll() is not None, "at its end", BACK_S)
            require(process.returncode == 0, f"the exit status is {process.returncode}")
        finally:
            process.kill()
    return f"{NUM_CALLS} calls, ended after {ended:.1f} s"


def _complete(url: str, token: int, **fields: object) -> int:
    """Request a short completion of a prompt with this token; returns the status."""
    asked = {"model": ask(f"{url}/v1/models").json()["data"][0]["id"], "prompt": [7, token, 9], "max_tokens": 3}
    return ask(f"{url}/v1/completions", {**asked, "temperature": 0.0, **fields}, timeout_s=120.0).status


HANGS = (
    Case("F17", "an engine that stands still", engine_stopped),
    Case("F18", "an idle time, then a long step", idle_then_busy),
    Case("F19", "modules in the model folder", modules_in_the_folder),
    Case("F20", "no more files", no_more_files),
    Case("F21", "a log that nobody reads", unread_log),
)
