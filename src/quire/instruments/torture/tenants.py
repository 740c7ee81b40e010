"""Tenants: one sends large texts, disconnects or uses all of its limits; another must not be slowed down."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from typing import Any

from quire.core.python_process import start_python
from quire.guide import GUIDE_FOLDER
from quire.instruments.http.plain import Answer, ask
from quire.instruments.http.sockets import Stream
from quire.instruments.torture.case import Case
from quire.instruments.torture.failure import require
from quire.instruments.torture.stage import KEY, OTHER_KEY, ServerSpec, Stage, TortureServer, wait_until
from quire.reporting.samples import percentile

TWO_KEYS = {"QUIRE_API_KEY": f"{KEY},{OTHER_KEY}", "QUIRE_OPEN_METRICS": "yes"}
OTHER: dict[str, str] = {"Authorization": f"Bearer {OTHER_KEY}"}

NUM_LARGE, NUM_LARGE_QUICK = 12, 5
LARGE_BYTES, LARGE_BYTES_QUICK = 4 << 20, 2 << 20
MAX_CALL_S, MAX_RESTART_S, MAX_STOP_S = 5.0, 10.0, 8.0
"""The longest time of a small call, of an engine restart and of a server stop during large texts."""

MAX_FIRST_TOKEN_S = 2.0
"""The limit for a small call of one tenant while another is at its limits."""

CONTEXT, LONG_CONTEXT = 2048, 300_000
NUM_RUNNING = 12
"""Running sequences of the other tenant once its load has started."""


def large_texts(stage: Stage) -> str:
    """L10: clients send large texts and leave: another tenant's call, a restart and a stop do not wait for them."""
    environment = {**TWO_KEYS, "QUIRE_MAX_BODY": "32MiB", "QUIRE_DRAIN_TIMEOUT_S": "1"}
    spec = ServerSpec.of(environment, model=_long_guide(stage), kv_memory="512MiB", policy="fair_share")
    with stage.serving(spec) as server:
        server.may_lose_bystanders = True
        _send_large_and_leave(stage, server)
        call = _small_chat(server)
        require(call.status == 200, f"the small call got {call.status}: {call.error.get('message')}")
        require(call.seconds < MAX_CALL_S, f"the small call took {call.seconds:.1f} s")
        _send_large_and_leave(stage, server)
        for engine in server.process.children():
            os.kill(engine, signal.SIGKILL)
        wait_until(lambda: not server.is_ready(), "reporting that the engine is gone")
        restart = wait_until(server.is_ready, "ready again", MAX_RESTART_S)
        _send_large_and_leave(stage, server)
        server.is_spoiled = True
        os.kill(server.process.pid, signal.SIGTERM)
        stop = wait_until(lambda: server.process.exit_status is not None, "at its end", MAX_STOP_S)
        require(server.process.exit_status == 0, f"the exit status is {server.process.exit_status}")
    return f"small call {call.seconds:.2f} s, restart {restart:.1f} s, stop {stop:.1f} s"


def tenant_at_its_limits(stage: Stage) -> str:
    """L11: one tenant uses all of its limits; small calls of another still get their first token quickly."""
    num_clients, seconds = (200, 4.0) if stage.is_quick else (400, 30.0)
    with stage.serving(ServerSpec.of(TWO_KEYS, policy="fair_share", kv_memory="64MiB")) as server:
        kinds = _all_it_can_get(server.model, stage.seed)
        kinds["all of these"] = [body for bodies in kinds.values() for body in bodies]
        waits = {name: _waits_beside(server, num_clients, bodies, seconds) for name, bodies in kinds.items()}
    p95 = {name: percentile(each, 0.95) for name, each in waits.items()}
    figures = ", ".join(f"{name} {p95[name]:.2f} (at most {max(each):.2f})" for name, each in waits.items())
    remark = f"p95 of the first token in s with {num_clients} clients: {figures}"
    require(max(p95.values()) < MAX_FIRST_TOKEN_S, f"{remark}; the bar is {MAX_FIRST_TOKEN_S:g}")
    return remark


# ---- steps of the cases ---------------------------------------------------------------------------------------------


def _send_large_and_leave(stage: Stage, server: TortureServer) -> None:
    """Send large texts to paths that tokenize, and disconnect; returns once the server works on the first."""
    number, size = (NUM_LARGE_QUICK, LARGE_BYTES_QUICK) if stage.is_quick else (NUM_LARGE, LARGE_BYTES)
    text = "A very long prompt. " * (size // 20)
    message = [{"role": "user", "content": text}]
    calls: tuple[tuple[str, dict[str, Any]], ...] = (
        ("/v1/completions", {"prompt": text}),
        ("/v1/chat/completions", {"messages": message, "truncate_prompt_tokens": 64}),
        ("/v1/messages", {"messages": message, "max_tokens": 4}),
        ("/v1/responses", {"input": text}),
        ("/tokenize", {"messages": message}),
    )
    for index in range(number):
        path, fields = calls[index % len(calls)]
        Stream(server.address, path, {"model": server.model, **fields}, headers=OTHER).leave()
    wait_until(lambda: server.metric("quire_texts_running") >= 1, "at work on a large text")


def _long_guide(stage: Stage) -> str:
    """Return a folder with the guide and a context length for large texts, which are refused unread otherwise."""
    folder = stage.folder / "long-guide"
    if not folder.exists():
        shutil.copytree(GUIDE_FOLDER, folder)
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        settings["max_position_embeddings"] = LONG_CONTEXT
        (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


def _small_chat(server: TortureServer) -> Answer:
    """Request a few tokens for a chat, which the server renders and tokenizes outside of the engine."""
    message = {"role": "user", "content": "What is a block?"}
    body = {"model": server.model, "messages": [message], "max_tokens": 4, "truncate_prompt_tokens": 256}
    return ask(f"{server.url}/v1/chat/completions", body, headers=server.headers, timeout_s=120.0)


def _all_it_can_get(model: str, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return bodies of every expensive kind, by name."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(300, 1900) for _ in range(count)]

    common = {"model": model, "temperature": 1.0, "ignore_eos": True}
    return {
        "n = 32": [{**common, "prompt": tokens(64), "n": 32, "max_tokens": 1024}],
        "128 prompts": [{**common, "prompt": [tokens(64) for _ in range(128)], "max_tokens": 256}],
        "long prompts": [{**common, "prompt": [tokens(CONTEXT - 48) for _ in range(12)], "max_tokens": 32}],
        "long texts": [{**common, "prompt": tokens(16), "max_tokens": CONTEXT - 32}],
    }


def _waits_beside(server: TortureServer, num_clients: int, bodies: list[dict[str, Any]], seconds: float) -> list[float]:
    """Return the times to first token of small calls while the other tenant uses all of its limits."""
    arguments, pipe = (
        ("-m", "quire.instruments.torture.flood", server.url, OTHER_KEY, str(num_clients)),
        subprocess.PIPE,
    )
    waits: list[float] = []
    with start_python(*arguments, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(bodies) + "\n")
            process.stdin.flush()
            wait_until(lambda: server.metric("quire_requests_running") >= NUM_RUNNING, "under load", 30.0)
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                waits.append(_first_token_s(server, len(waits)))
                time.sleep(0.05)
            counts = json.loads(process.communicate(timeout=60.0)[0])
        finally:
            process.kill()
    require(counts.get("503", 0) + counts.get("429", 0) > 0, f"the other tenant was never at its limits: {counts}")
    server.wait_idle()
    return waits


def _first_token_s(server: TortureServer, index: int) -> float:
    """Send a small call, and return the time to its first token."""
    body = {"model": server.model, "prompt": [300 + index % 1500, 7, 9, 11], "max_tokens": 4, "stream": True}
    started = time.monotonic()
    with Stream(server.address, "/v1/completions", body, headers=server.headers, timeout_s=120.0) as stream:
        first = stream.read_events(1)
        require(stream.status == 200 and bool(first), f"a small call got {stream.status}")
        return time.monotonic() - started


TENANTS = (
    Case("L10", "large texts of clients that leave", large_texts),
    Case("L11", "a tenant at its limits", tenant_at_its_limits),
)
