"""`GET /live` over HTTP: what a reader puts together is the engine, whoever else reads, and nobody leaves a trace."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.core.config import EngineConfig
from quire.instruments.http.server_process import ServerProcess
from support.live_lines import LiveLines, Picture
from support.prometheus_text import parse
from support.server import RunningServer, running_server

PROMPT = "A block table maps the positions of a sequence to blocks of memory. "


def is_idle(picture: Picture) -> bool:
    return not picture.requests and not picture.last["running"] and not picture.last["waiting"]


def complete(server: RunningServer, prompt: str, key: str = "none", **fields: Any) -> None:
    with server.client(api_key=key) as client:
        client.completions.create(
            **{"model": "guide", "prompt": prompt, "max_tokens": 24, "temperature": 0} | fields,
        )


def work(server: RunningServer, keys: tuple[str, ...] = ("none",)) -> None:
    """Prompts that begin alike, several texts of one prompt, a stream that is left, all side by side."""
    jobs = [
        lambda key: complete(server, PROMPT * 3, key),
        lambda key: complete(server, PROMPT * 3 + "What", key, n=3, temperature=1),
        lambda key: complete(server, f"{key} alone", key, max_tokens=40),
        lambda key: leave_early(server, key),
    ]
    threads = [threading.Thread(target=job, args=(key,)) for key in keys for job in jobs for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_until_idle()


def leave_early(server: RunningServer, key: str) -> None:
    with server.client(api_key=key) as client:
        stream = client.completions.create(
            model="guide", prompt=PROMPT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(settings={"kv_memory": "1MiB", "max_num_seqs": 8, "speculation": "auto"}) as running:
        yield running


def test_what_a_reader_puts_together_is_the_engine(server: RunningServer) -> None:
    with LiveLines(server.port) as first:
        first.until(is_idle)
        work(server)
        picture = first.until(lambda found: is_idle(found) and found.last["totals"]["generated_tokens"] > 0)
        time.sleep(0.3)
        with LiveLines(server.port) as second:
            late = second.until(is_idle)
            # Each line has the history of the time before it.
            assert first.hello | {"history": None} == second.hello | {"history": None}
            assert not first.hello["history"]
            assert second.hello["history"]
            assert (late.blocks, late.last["ledger"]) == (picture.blocks, picture.last["ledger"])
        memory = server.llm.engine.scheduler.memory
        ledger = memory.ledger()
        shown = picture.last["ledger"]
        assert shown == {
            "used": 0,
            "cached": ledger.cached_blocks,
            "free": ledger.free_blocks,
            "stored": 0,
            "reserved": 0,
            "fragmented": 0,
            "saved": 0,
        }
        cached = {block.block_id for block in memory.pool.blocks if block.entry is not None}
        assert set(picture.blocks) == cached
        for block_id, row in picture.blocks.items():
            entry = memory.pool.blocks[block_id].entry
            assert entry is not None and entry.parent is not None
            assert row[1:5] == [2, 0, -1, entry.parent.block_ids[0]]
        assert first.hello["num_blocks"] == memory.pool.num_blocks
        check_totals(server, picture)


def check_totals(server: RunningServer, picture: Picture) -> None:
    """Compare with what /metrics tells, and the events with the texts that ended."""
    told = parse(server.get("/metrics").body.decode())
    totals = picture.last["totals"]
    for name, family in (
        ("prompt_tokens", "quire_prompt_tokens_total"),
        ("generated_tokens", "quire_generated_tokens_total"),
        ("queried_tokens", "quire_prefix_cache_queried_tokens_total"),
        ("hit_tokens", "quire_prefix_cache_hit_tokens_total"),
        ("evictions", "quire_evictions_total"),
        ("preemptions", "quire_preemptions_total"),
        ("verified_guesses", "quire_draft_tokens_total"),
        ("drafts", "quire_drafts_total"),
        ("right_guesses", "quire_accepted_draft_tokens_total"),
    ):
        assert totals[name] == told[family].value(), name
    kinds = Counter(kind for _, kind, _, _ in picture.events)
    numbers = Counter[str]()
    for _, kind, _, number in picture.events:
        numbers[kind] += number
    assert kinds["finished"] == 2 * (1 + 3 + 1)
    assert kinds["aborted"] == 2
    assert numbers["evicted"] == totals["evictions"]
    assert kinds["preempted"] == totals["preemptions"]


KEYS = """
- {name: alice, key: alice}
- {name: bob, key: bob}
- {name: owner, key: owner, operator: true}
"""


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    path = tmp_path / "keys.yaml"
    path.write_text(KEYS)
    return str(path)


def test_a_tenant_sees_its_own_and_an_operator_everything(keys_file: str) -> None:
    settings = {"kv_memory": "1MiB", "max_num_seqs": 4}
    with running_server(settings=settings, api_keys_file=keys_file, max_queued_sequences=64) as server:
        pool = server.llm.engine.scheduler.memory.pool
        with (
            LiveLines(server.port, "alice") as alice,
            LiveLines(server.port, "bob") as bob,
            LiveLines(server.port, "owner") as owner,
        ):
            for lines in (alice, bob, owner):
                lines.until(is_idle)
            complete(server, PROMPT * 2, "bob")
            work(server, ("alice", "bob"))
            for lines in (alice, bob, owner):
                lines.until(lambda found: is_idle(found) and found.last["totals"]["generated_tokens"] > 0)
            time.sleep(1.2)
            held = Counter(block.tenant for block in pool.blocks if block.entry is not None)
            for name, lines in (("alice", alice), ("bob", bob)):
                check_tenant(lines, name, held[name])
            totals = owner.picture.last["totals"]
            for field in ("prompt_tokens", "generated_tokens", "evictions", "preemptions"):
                parts = [lines.picture.last["totals"][field] for lines in (alice, bob)]
                assert totals[field] == sum(parts) and min(parts) >= 0, field
            assert owner.hello["scope"] == "operator"
            assert owner.picture.last["ledger"]["cached"] == held.total()
            assert b'"alice"' in owner.text and b'"bob"' in owner.text
            assert len([event for event in bob.picture.events if event[1] == "finished"]) == 1 + 2 * 5


def check_tenant(lines: LiveLines, name: str, num_cached: int) -> None:
    """Nothing of a stream is of another tenant: no name, no block, no request, and no number that counts others."""
    other = {"alice": b"bob", "bob": b"alice"}[name]
    assert other not in lines.text and b"owner" not in lines.text
    assert (lines.hello["scope"], lines.hello["tenant"]) == ("tenant", name)
    ledger = lines.picture.last["ledger"]
    assert (ledger["used"], ledger["cached"], ledger["free"]) == (0, num_cached, 0)
    most, blocks, requests = 0, set[int](), set[int]()
    for line in lines.text.splitlines()[1:]:
        frame = json.loads(line)
        most = max(most, frame["ledger"]["used"] + frame["ledger"]["cached"])
        blocks |= {row[0] for row in frame["blocks"]}
        requests |= {row[0] for row in frame["requests"]}
        assert {row[2] for row in frame["requests"]} <= {name}
    assert len(blocks) <= max(blocks) + 1 <= 2 * most, "numbers of blocks count those of others"
    assert len(requests) <= max(requests) + 1 <= 13, "numbers of requests count those of others"


@pytest.mark.parametrize(
    ("keys", "key", "scope"),
    [((), "", "operator"), (("one",), "one", "operator"), (("one", "two"), "two", "tenant")],
)
def test_who_is_an_operator_where_there_is_no_file(keys: tuple[str, ...], key: str, scope: str) -> None:
    with running_server(api_key=keys) as server, LiveLines(server.port, key) as lines:
        lines.until(is_idle)
        assert lines.hello["scope"] == scope


def test_whoever_has_no_key_sees_nothing(keys_file: str) -> None:
    with running_server(api_keys_file=keys_file) as server:
        for headers in ({}, {"Authorization": "Bearer nobody"}):
            answer = server.ask("GET", "/live", None, headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        answer = server.ask("HEAD", "/live", None, {"Authorization": "Bearer alice"})
        assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")


def is_watched(server: RunningServer) -> bool:
    return server.llm.engine.scheduler.memory.pool.journal is not None


def wait_until_nobody_watches(server: RunningServer) -> None:
    end = time.monotonic() + 300
    while server.call(lambda: server.services.live.num_readers) or is_watched(server):
        assert time.monotonic() < end, "somebody watches still"
        time.sleep(0.01)


def test_so_many_readers_and_no_more() -> None:
    with running_server(max_live_readers=2) as server:
        with LiveLines(server.port) as first, LiveLines(server.port) as second:
            first.until(is_idle), second.until(is_idle)
            assert is_watched(server)
            answer = server.get("/live")
            assert (answer.status, answer.error["code"]) == (503, "too_many_readers")
            assert "retry-after" in answer.headers
        wait_until_nobody_watches(server)
        with LiveLines(server.port) as third:
            third.until(is_idle)


def test_two_hundred_readers_come_and_leave() -> None:
    with running_server(max_live_readers=200) as server:
        with LiveLines(server.port) as one:
            one.until(is_idle)
        wait_until_nobody_watches(server)
        before = len(os.listdir("/proc/self/fd"))
        readers = [LiveLines(server.port) for _ in range(200)]
        complete(server, PROMPT)
        for reader in readers:
            reader.until(lambda found: is_idle(found) and bool(found.blocks))
        for reader in readers:
            reader.close()
        wait_until_nobody_watches(server)
        end = time.monotonic() + 300
        while len(os.listdir("/proc/self/fd")) > before:
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_reader_that_reads_nothing_is_cut_off_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.serve.live.FRAMES_EVERY_S", 0.01)  # the server soon has more than its buffers hold
    with running_server(send_buffer=1024, write_timeout_s=0.3) as server, LiveLines(server.port) as lines:
        lines.until(is_idle)
        live = server.services.live
        stuck = LiveLines(server.port, receive_buffer=1024, reads=False)
        while server.call(lambda: live.num_readers) < 2:
            time.sleep(0.01)
        end = time.monotonic() + 300
        while server.call(lambda: live.num_readers) > 1:
            assert time.monotonic() < end, "it was not cut off"
            work(server)
        lines.until(lambda found: is_idle(found) and bool(found.blocks))
        stuck.close()


def test_an_engine_that_is_killed_is_watched_again_until_the_server_ends() -> None:
    config = EngineConfig(model="guide", kv_memory="1MiB", num_threads=1)
    with ServerProcess(config) as process:
        port = int(process.url.rpartition(":")[2])
        with LiveLines(port) as lines:
            lines.until(lambda found: found.last["state"] == "ready")
            engine = process.children()[0]  # behind it stand its own
            ask(port, PROMPT)
            lines.until(lambda found: bool(found.blocks))
            os.kill(engine, signal.SIGKILL)
            gone = lines.until(lambda found: found.last["state"] == "restarting")
            assert gone.last["full"] and not gone.blocks and gone.last["ledger"]["used"] == 0
            lines.until(lambda found: found.last["state"] == "ready")
            ask(port, PROMPT)
            picture = lines.until(lambda found: bool(found.blocks) and is_idle(found))
            assert picture.last["step"] > 0
            os.kill(process.pid, signal.SIGTERM)
            assert lines.has_ended.wait(300)
        while process.exit_status is None:
            time.sleep(0.01)
        assert process.exit_status == 0


def ask(port: int, prompt: str) -> dict[str, Any]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    body = json.dumps({"model": "guide", "prompt": prompt, "max_tokens": 20})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    value = json.loads(answer.read())
    assert answer.status == 200, value
    connection.close()
    return value
