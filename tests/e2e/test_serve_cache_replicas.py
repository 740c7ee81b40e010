"""What operators have the caches of several engines do: prompts kept, given away and taken in, while engines die."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.prometheus_text import parse
from support.served_process import ServedProcess, served_process
from support.server import JSON, running_server
from support.server_thread import Answer
from support.waiting import wait_until

PROMPT, OTHER = ([first + index % 50 for index in range(70)] for first in (5, 6))
BUNDLE = {"content-type": "application/octet-stream"}


def ask(server: ServedProcess, path: str, body: bytes, headers: Mapping[str, str] = JSON) -> Answer:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("POST", path, body, dict(headers))
        return Answer.of(connection.getresponse())


def warm(server: ServedProcess, prompt: Any) -> list[dict[str, Any]]:
    answer = ask(server, "/cache/warm", json.dumps({"prompt": prompt}).encode())
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.value["data"]
    return found


def export(server: ServedProcess, prompt: list[int]) -> bytes:
    answer = ask(server, "/cache/export", json.dumps({"prompt": prompt}).encode())
    assert answer.status == 200, answer.body
    return answer.body


def take(server: ServedProcess, bundle: bytes) -> dict[str, Any]:
    answer = ask(server, "/cache/import", bundle, BUNDLE)
    assert answer.status == 200, answer.body
    taken: dict[str, Any] = answer.value
    return taken


def complete(server: ServedProcess, prompt: list[int]) -> tuple[Any, int, int]:
    """Return a text, bit for bit, and how many tokens of its prompt were cached and came from disk."""
    answer = server.complete({"prompt": prompt, "max_tokens": 6, "seed": 3, "logprobs": 2})
    details = answer["usage"]["prompt_tokens_details"]
    return answer["choices"][0], details["cached_tokens"], details.get("by_tier", {"disk": 0})["disk"]


def metric(server: ServedProcess, name: str, **labels: str) -> float:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("GET", "/metrics")
        return parse(connection.getresponse().read().decode())[name].value(**labels)


def wait_all_ready(server: ServedProcess) -> None:
    wait_until(lambda: all(metric(server, "quire_replica_ready", replica=name) for name in "01"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ServedProcess]:
    """Two engines with a disk cache each, in one folder."""
    with served_process(folder, "--replicas", "2", "--disk-cache", str(folder / "cache")) as server:
        yield server


@pytest.fixture
def fleet(running: ServedProcess) -> ServedProcess:
    wait_all_ready(running)
    return running


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    folder = tmp_path_factory.mktemp("alone")
    with served_process(folder, "--disk-cache", str(folder / "cache")) as server:
        yield server


def test_a_prompt_is_warmed_where_the_next_one_goes_and_exported_from_there(
    fleet: ServedProcess, alone: ServedProcess
) -> None:
    num_kept = metric(fleet, "quire_disk_blocks_kept")
    others = [[number] * 70 for number in range(9, 13)]
    (first,) = warm(fleet, PROMPT)
    assert (first["cached_tokens_before"], first["cached_tokens"], first["stored_tokens"]) == (0, 64, 64)
    assert metric(fleet, "quire_replica_routes_total", replica=str(first["replica"]), reason="new") == 1
    expected, num_cached, from_disk = complete(fleet, [*PROMPT, 7])
    assert (num_cached >= 64, from_disk) == (True, 0)
    data = warm(fleet, [PROMPT, *others])
    assert (data[0]["cached_tokens_before"] >= 64, data[0]["replica"]) == (True, first["replica"])
    assert {each["replica"] for each in data} == {0, 1}, "each where it was computed"
    assert all(each["stored_tokens"] == 64 for each in data)
    bundles = [export(fleet, prompt) for prompt in (PROMPT, *others)]
    assert metric(fleet, "quire_disk_blocks_kept") == num_kept + 4 * 5, "nothing was computed or stored twice"

    assert export(alone, PROMPT) == bundles[0], "whichever engine computed them: these are the bytes"
    taken = [take(alone, bundle) for bundle in bundles]
    assert [(each["added"], each["known"], each["replicas"]) for each in taken] == [(0, 4, 1)] + [(4, 0, 1)] * 4
    assert complete(alone, [*PROMPT, 7])[0] == expected


def test_a_bundle_goes_to_every_engine_and_outlives_each(fleet: ServedProcess, alone: ServedProcess) -> None:
    num_kept = metric(fleet, "quire_disk_blocks_kept")
    bundle = export(alone, OTHER)
    expected = complete(alone, [*OTHER, 7])[0]
    taken = take(fleet, bundle)
    assert (taken["blocks"], taken["added"], taken["known"], taken["replicas"]) == (4, 4, 0, 2)
    assert metric(fleet, "quire_disk_blocks_kept") == num_kept + 8
    assert complete(fleet, [*OTHER, 7]) == (expected, 64, 64)
    for engine in fleet.engines:
        os.kill(engine, signal.SIGKILL)
        found, num_cached, _ = complete(fleet, [*OTHER, 7])
        assert (found, num_cached >= 64) == (expected, True), "the other one has it, or had it"
        wait_until(lambda gone=engine: len(fleet.engines) == 2 and gone not in fleet.engines)
        wait_all_ready(fleet)
    again = take(fleet, bundle)
    assert (again["added"], again["known"], again["left_out"]) == (0, 4, 0), "also after a restart"


def test_an_engine_that_dies_under_a_call_ends_only_that_call(fleet: ServedProcess, folder: Path) -> None:
    bundle = export(fleet, PROMPT)
    with closing(http.client.HTTPConnection("127.0.0.1", fleet.port, timeout=300)) as connection:
        connection.putrequest("POST", "/cache/import")
        connection.putheader("content-type", "application/octet-stream")
        connection.putheader("content-length", str(len(bundle)))
        connection.endheaders(bundle[: len(bundle) // 2])
        wait_until(lambda: list((folder / "cache").glob("incoming-*")))
        os.kill(fleet.engines[0], signal.SIGKILL)
        connection.send(bundle[len(bundle) // 2 :])
        answer = Answer.of(connection.getresponse())
    assert answer.status in (200, 503), "200: the server had noticed, and the other one took it in"
    wait_until(lambda: not list((folder / "cache").glob("incoming-*")))
    wait_all_ready(fleet)
    taken = take(fleet, bundle)
    assert (taken["added"] + taken["known"], taken["replicas"]) == (4, 2)

    prompts = [[number, *range(100, 800)] for number in range(30)]
    fields, answers = json.dumps({"prompt": prompts}).encode(), list[Answer]()
    num_kept = metric(fleet, "quire_disk_blocks_kept")
    call = threading.Thread(target=lambda: answers.append(ask(fleet, "/cache/warm", fields)))
    call.start()
    wait_until(lambda: metric(fleet, "quire_disk_blocks_kept") > num_kept + 40 or not call.is_alive())
    os.kill(fleet.engines[1], signal.SIGKILL)
    call.join(300)
    assert answers[0].status in (200, 503)
    if answers[0].status == 503:
        assert answers[0].error["code"] == "engine_unavailable"
    wait_all_ready(fleet)
    assert all(each["cached_tokens"] >= 688 for each in warm(fleet, prompts[:8]))


def test_blocks_on_other_machines_are_moved_there() -> None:
    with running_server(replicas="ray:2") as server:
        for path in ("/cache/export", "/cache/import"):
            answer = server.ask("POST", path, b"{}", JSON)
            assert (answer.status, answer.error["code"]) == (400, "stores_elsewhere")
