"""A server of several engines over HTTP: one is killed in mid-stream, all are restarted, and no client notices."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from quire.engine.replicas.replica_set import AT_FAULT
from support.live_lines import LiveLines
from support.served_process import ServedProcess, served_process

NUM_STREAMS = 6
MOST_KILLS = 10
WANTED: list[dict[str, Any]] = [
    {"temperature": 0.9, "logprobs": 1},
    {"temperature": 0.0, "frequency_penalty": 0.3},
    {"temperature": 0.7, "n": 2, "stop": [" because", "blocks of"]},
]


def body(number: int) -> dict[str, Any]:
    return {
        "prompt": f"{number}. A block table " * (1 + number % 4),
        "max_tokens": 300,
        "ignore_eos": True,
        "seed": number,
        "stream": True,
        "stream_options": {"include_usage": True},
        **WANTED[number % len(WANTED)],
    }


def stream(server: ServedProcess, number: int, begun: threading.Semaphore | None = None) -> tuple[Any, ...]:
    """Return the texts of a completion, how they ended, their log-probabilities, and the usage."""
    texts, ends, logprobs, usage = ["", ""], ["", ""], [], None
    for event in events(server, body(number)):
        if begun is not None:
            begun.release()
            begun = None
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            ends[choice["index"]] = choice["finish_reason"] or ends[choice["index"]]
            logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
    return texts, ends, logprobs, usage


def events(server: ServedProcess, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                yield event


def ask(server: ServedProcess, method: str, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def metric(server: ServedProcess, name: str) -> float:
    _, text = ask(server, "GET", "/metrics")
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, name
    return float(found[1])


def frame(server: ServedProcess) -> dict[str, Any]:
    """Return the first frame of /live, once the engine that was killed is back."""
    while metric(server, 'quire_replica_ready{replica="1"}') == 0:
        time.sleep(0.02)
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("GET", "/live")
        answer = connection.getresponse()
        found: dict[str, Any] = next(line for line in map(json.loads, answer) if line["type"] == "frame")
    return found


def all_streams(server: ServedProcess, trouble: Any = None) -> list[tuple[Any, ...]]:
    """Return what streams say, while something happens once each of them has begun."""
    begun = threading.Semaphore(0)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        streams = [threads.submit(stream, server, number, begun) for number in range(NUM_STREAMS)]
        for _ in range(NUM_STREAMS):
            assert begun.acquire(timeout=300)
        if trouble is not None:
            trouble()
        return [each.result(300) for each in streams]


def test_clients_notice_neither_a_kill_nor_a_rolling_restart(tmp_path: Path) -> None:
    with served_process(tmp_path, "--replicas", "2", "--max-num-seqs", "8", "--no-enable-prefix-caching") as server:
        while len(server.engines) < 2 or metric(server, 'quire_replica_ready{replica="1"}') == 0:
            time.sleep(0.02)
        first = server.engines
        calm = all_streams(server)

        num_kills = 0
        while metric(server, "quire_texts_continued_total") == 0:  # on a busy machine its texts may have ended
            assert num_kills < MOST_KILLS
            (victim,) = set(server.engines) - {first[0]}
            assert all_streams(server, partial(os.kill, victim, signal.SIGKILL)) == calm
            num_kills += 1
            while metric(server, 'quire_replica_restarts_total{replica="1"}') < num_kills:
                time.sleep(0.02)
            rows = frame(server)["replicas"]
        assert ask(server, "GET", "/health")[0] == 200
        assert [row["state"] for row in rows] == ["ready"] * 2
        assert [row["restarts"] for row in rows] == [0, num_kills]
        num_routes = sum(sum(row["routes"].values()) for row in rows)
        assert num_routes > (1 + num_kills) * NUM_STREAMS, "those that went on count too"

        answers: list[tuple[int, str]] = []
        assert all_streams(server, lambda: answers.append(ask(server, "POST", "/restart_engines"))) == calm
        assert answers == [(200, '{"status":"ok"}')]
        assert len(server.engines) == 2
        assert not set(server.engines) & set(first)
        assert metric(server, "quire_requests_at_fault_total") == 0


KILLING = "kill:token=777"


def require_at_fault(server: ServedProcess) -> None:
    """Ask for what kills engines: its client gets an error, and engines that are started again serve others."""
    fields = json.dumps({"prompt": [5, 777, 6], "max_tokens": 5})
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", fields, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
    assert (answer.status, answer.headers["x-should-retry"]) == (500, "false")
    assert (error["code"], error["message"].endswith(AT_FAULT)) == ("generation_failed", True)
    server.wait_ready()
    assert server.complete({"prompt": [5, 7, 6], "max_tokens": 5})["usage"]["completion_tokens"] == 5


def test_each_reader_watches_one_replica_and_a_request_that_kills_both_is_not_to_be_tried_again(tmp_path: Path) -> None:
    with served_process(tmp_path, "--replicas", "2", failpoints=KILLING) as server:
        with LiveLines(server.port, query="?replica=0") as one, LiveLines(server.port, query="?replica=1") as other:
            for lines in (one, other):
                lines.until(lambda found: [row["state"] for row in found.last["replicas"]] == ["ready"] * 2)
            assert [lines.hello["replica"] for lines in (one, other)] == [0, 1]
            for _ in range(3):
                server.complete({"prompt": [5] * 64, "max_tokens": 4})
            for index, lines in enumerate((one, other)):
                lines.until(lambda found: sum(row["cached"] for row in found.last["replicas"]) == 4)
                lines.until(lambda found, at=index: len(found.blocks) == found.last["replicas"][at]["cached"])  # type: ignore[misc]
            rows = one.picture.last["replicas"]
            holder = 0 if rows[0]["cached"] else 1
            assert rows[holder]["routes"] == {"prefix": 2, "load": 0, "new": 1, "only": 0}
            assert (rows[holder]["hit_tokens"], rows[holder]["queried_tokens"]) == (2 * 63, 3 * 64)
            assert rows[1 - holder]["routes"] == {"prefix": 0, "load": 0, "new": 0, "only": 0}
            text = ask(server, "GET", "/metrics")[1]
            assert f'quire_replica_routes_total{{replica="{holder}",reason="prefix"}} 2' in text

            (holding, empty) = (one, other) if holder == 0 else (other, one)
            with LiveLines(server.port, query=f"?replica={holder}") as late:
                assert len(late.until(lambda found: bool(found.blocks)).blocks) == 4, "watched by two"
            os.kill(server.engines[holder], signal.SIGKILL)
            ended = "the engine process has ended with status -9"
            down = empty.until(lambda found: ended in found.failures).failures[ended]
            lost = next(row for row in down["replicas"] if row["failure"])
            assert (lost["state"], lost["blocks"]) == ("restarting", 0)
            assert down["state"] == "ready", "the model still answers"
            server.complete({"prompt": [6] * 64, "max_tokens": 4})
            rows = empty.until(lambda found: sum(row["restarts"] for row in found.last["replicas"]) == 1).last[
                "replicas"
            ]
            if rows[holder]["restarts"]:  # which process is which engine only the system knows
                holding.until(lambda found: found.last["full"] and not found.blocks)
            for lines in (one, other):
                lines.until(lambda found: [row["state"] for row in found.last["replicas"]] == ["ready"] * 2)
        status, refused = ask(server, "GET", "/live?replica=2")
        assert (status, json.loads(refused)["error"]["param"]) == (400, "replica")
        require_at_fault(server)


def test_a_request_that_kills_engines_is_not_to_be_tried_again(tmp_path: Path) -> None:
    with served_process(tmp_path, failpoints=KILLING) as server:
        require_at_fault(server)
