"""What a server has done is in its step log, whatever its clients did: every plan can be made again to the byte."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire import EngineConfig, SamplingParams
from quire.cli import main
from quire.engine.commands import Abort, Add, Clear, Stop, read_command
from quire.engine.records.step_log import COMMANDED, PLANNED, read_records, replay
from quire.engine.replicas.supervised import SupervisedLLM
from support.server import RunningServer, running_server

SCHEMA = {"type": "object", "properties": {"name": {"enum": ["block", "table"]}}, "required": ["name"]}
BEGINNING = "A block table says where the tokens of a request are. " * 3


def ask(server: RunningServer, number: int) -> None:
    """Ask something, of a kind that depends on the number."""
    body: dict[str, Any] = {"prompt": f"{BEGINNING}{number % 7}", "max_tokens": 40, "seed": number, "ignore_eos": True}
    match number % 6:
        case 0:
            body |= {"n": 3}
        case 1:
            body |= {"use_beam_search": True, "n": 2, "best_of": 2, "temperature": 0, "ignore_eos": False}
        case 2:
            body |= {"priority": number}
        case 3:
            body |= {"stop": ["e"], "ignore_eos": False}
        case 4:
            schema = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
            body |= {"response_format": schema, "ignore_eos": False, "max_tokens": 30}
        case 5:
            leave_early(server, body | {"stream": True, "max_tokens": 60})
            return
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body


def ask_for_much(server: RunningServer, number: int) -> None:
    """Ask for a text that fills most of the memory: two at once have to yield to one another."""
    body = {"prompt": f"{number} blocks", "max_tokens": 220, "seed": number, "ignore_eos": True}
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body


def leave_early(server: RunningServer, body: dict[str, Any]) -> None:
    """Begin to read a stream, and go away."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=300) as connection:
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + data)
        connection.recv(300)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"kv_memory": "384KiB"}, marks=pytest.mark.long),
        pytest.param({"kv_memory": "384KiB", "swap_space": "1MiB", "preemption": "swap"}, marks=pytest.mark.long),
        {"kv_memory": "384KiB", "max_steps_under_way": 2, "policy": "priority"},
    ],
    ids=str,
)
def test_a_live_run_is_planned_again_to_the_byte(
    settings: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.steplog"
    with running_server(
        "guide", {**settings, "max_model_len": 250, "step_log": path}, max_queued_sequences=100
    ) as server:
        with ThreadPoolExecutor(12) as pool:
            list(pool.map(lambda number: ask(server, number), range(24)))
            list(pool.map(lambda number: ask_for_much(server, number), range(8)))
        server.wait_until_idle()
        server.llm.reset_prefix_cache()  # from another thread than that of its event loop
        ask(server, 2)
        server.wait_until_idle()
        stats = server.llm.engine.stats()
        assert stats.hit_tokens_total > 0
        assert stats.preemptions_total > 0
        assert server.llm.engine.scheduler.config.policy == settings.get("policy", "fcfs")
        records = list(read_records(io.BytesIO(path.read_bytes())))  # while it is open
        verbs = Counter(type(read_command(each.payload)) for each in records if each.kind == COMMANDED)
        assert (verbs[Add], verbs[Clear]) == (24 + 8 + 1, 1)
        assert verbs[Abort] > 0
        assert verbs[Stop] > 0
        assert sum(each.kind == PLANNED for each in records) == stats.steps_total
    assert main(["simulate", "--replay", str(path)]) == 0
    assert capsys.readouterr().out == f"{stats.steps_total:,} plans, all identical byte for byte\n"
    assert main(["report", str(path), "--limit", "12", "--json", "-"]) == 0
    report = json.loads(capsys.readouterr().out)
    recorded, ledger = report["recorded"], report["recorded"]["ledger"]
    assert (ledger["queried_tokens"], ledger["hit_tokens"]) == (stats.queried_tokens_total, stats.hit_tokens_total)
    assert (ledger["evictions"], recorded["num_preemptions"]) == (stats.evictions_total, stats.preemptions_total)
    assert (recorded["num_plans"], recorded["num_aborted"] > 0) == (stats.steps_total, True)
    assert (recorded["num_swapped"] > 0) == ("swap_space" in settings)
    assert 0 < recorded["ttft_s"]["p50"] <= recorded["latency_s"]["p50"] <= recorded["duration_s"]
    assert report["simulated"]["num_requests"] == 12
    assert {"--block-size 32", "--no-enable-prefix-caching"} <= {found["setting"] for found in report["findings"]}


def test_an_engine_that_is_started_again_writes_on_in_another_file(tmp_path: Path) -> None:
    path = tmp_path / "run.steplog"
    config = EngineConfig(model="guide", kv_memory="2MiB", num_threads=1, step_log=str(path))

    async def read(llm: SupervisedLLM, prompt: str, on_delta: Callable[[], None], max_tokens: int = 10) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        async for _ in llm.deltas(await llm.prepare(prompt, sampling)):
            on_delta()

    async def test() -> None:
        async with asyncio.timeout(300), SupervisedLLM(config) as llm:
            await read(llm, "The memory", lambda: None)
            first = llm.engine_process_id

            def kill() -> None:
                if llm.engine_process_id == first is not None:
                    os.kill(first, signal.SIGKILL)

            await read(llm, "A block", kill, 1200)
            assert llm.stats().restarts_total == 1
            await read(llm, "The pool", lambda: None)

    asyncio.run(test())
    logs = [io.BytesIO((tmp_path / name).read_bytes()) for name in ("run.steplog", "run.steplog.1")]
    asked = [[read_command(each.payload) for each in read_records(log) if each.kind == COMMANDED] for log in logs]
    added = [[each for each in commands if isinstance(each, Add)] for commands in asked]
    assert [len(commands) for commands in added] == [2, 2]
    assert [len(each.output_token_ids) > 0 for each in added[1]] == [True, False]
    for log in logs:
        log.seek(0)
        assert replay(log) >= 5  # the one that was killed, too: nothing waits in a buffer


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.steplog"
    with running_server("guide", {"step_log": path}) as server:
        ask(server, 0)
        server.wait_until_idle()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 500, limits[1]))
        try:
            ask(server, 0)
            server.wait_until_idle()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        num_bytes = path.stat().st_size
        ask(server, 1)
    assert path.stat().st_size == num_bytes
    assert len([text for text in caplog.messages if "ends here, and the engine goes on" in text]) == 1
    assert replay(io.BytesIO(path.read_bytes())) > 0
