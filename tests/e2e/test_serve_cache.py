"""What operators have the cache do over HTTP: keep prompts, give blocks away, and take them in elsewhere."""

from __future__ import annotations

import errno
import http.client
import json
import os
import shutil
import signal
import socket
import struct
import threading
import zlib
from array import array
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.compute.worker.store.portable import HEAD_BYTES, beginning_bytes, beginning_size, read_beginning
from quire.compute.worker.store.record import read_record, write_record
from quire.compute.worker.store.spool import Spool, remove_abandoned
from quire.core.kept_block import KeptBlock, record_bytes
from quire.core.request import CacheScope
from quire.engine.records.step_log import replay
from quire.instruments.http.sockets import head, read_answer
from support.served_process import ServedProcess, served_process
from support.server import JSON, RunningServer, running_server
from support.server_thread import Answer
from support.waiting import wait_until

PROMPT = [5 + index % 50 for index in range(70)]
MESSAGES = [
    {"role": "system", "content": "You explain the paged memory of an engine in short sentences. " * 3},
    {"role": "user", "content": "What is a block?"},
]
BUNDLE = {"content-type": "application/octet-stream"}
KEYS = """
- {name: alice, key: alice, operator: true, persist: true}
- {name: bob, key: bob, persist: true}
- {name: carl, key: carl, operator: true}
"""


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {"kv_memory": "4MiB", "disk_cache": folder, "disk_cache_size": "8MiB", "num_threads": 1} | more


def export(server: RunningServer, fields: dict[str, Any], key: str = "none") -> Answer:
    headers = {**JSON, "authorization": f"Bearer {key}"}
    return server.ask("POST", "/cache/export", json.dumps(fields).encode(), headers)


def take(server: RunningServer, bundle: bytes, key: str = "none", query: str = "") -> Answer:
    return server.ask("POST", f"/cache/import{query}", bundle, {**BUNDLE, "authorization": f"Bearer {key}"})


def complete(server: RunningServer, prompt: list[int], key: str = "none", **more: Any) -> tuple[Any, Any]:
    """Return what a completion brings, bit for bit, and where its cached tokens came from."""
    fields = {"prompt": prompt, "max_tokens": 6, "seed": 3, "logprobs": 2} | more
    headers = {**JSON, "authorization": f"Bearer {key}"}
    answer = server.ask("POST", "/v1/completions", json.dumps(fields).encode(), headers)
    assert answer.status == 200, answer.body
    return answer.value["choices"][0], answer.value["usage"]["prompt_tokens_details"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The four blocks of the prompt."""
    with running_server(settings=settings(tmp_path_factory.mktemp("source"))) as server:
        answer = export(server, {"prompt": PROMPT})
        assert answer.status == 200, answer.body
        return answer.body


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A server that takes bundles in, and its folder."""
    folder = tmp_path_factory.mktemp("target")
    with running_server(settings=settings(folder)) as server:
        yield server, folder


def test_prompts_are_warmed_without_a_disk_too() -> None:
    with running_server(settings={"kv_memory": "4MiB", "num_threads": 1}) as server:
        first = server.post("/cache/warm", {"prompt": [PROMPT, PROMPT[:20]]}).value["data"]
        assert [each["prompt_tokens"] for each in first] == [70, 20]
        assert [each["cached_tokens"] for each in first] == [64, 16]
        assert first[0]["cached_tokens_before"] == 0
        assert [each["stored_tokens"] for each in first] == [None, None]
        again = server.post("/cache/warm", {"prompt": PROMPT}).value["data"]
        assert (again[0]["cached_tokens_before"], again[0]["cached_tokens"]) == (64, 64)
        assert complete(server, [*PROMPT, 7])[1]["cached_tokens"] == 64
        for path in ("/cache/export", "/cache/import"):
            answer = server.ask("POST", path, b'{"prompt": [1]}', JSON if path.endswith("export") else BUNDLE)
            assert (answer.status, answer.error["code"]) == (404, "no_disk_cache")
            assert "--disk-cache" in answer.error["message"]


def test_a_prompt_is_exported_and_hit_elsewhere_with_the_same_bits(tmp_path: Path) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 6, "seed": 3, "logprobs": True}
    with running_server(settings=settings(tmp_path / "one")) as server:
        expected, _ = complete(server, [*PROMPT, 7])
        answer = server.post("/v1/chat/completions", chat)
        warmed = server.post("/cache/warm", {"prompt": PROMPT}).value["data"][0]
        assert (warmed["cached_tokens_before"], warmed["cached_tokens"], warmed["stored_tokens"]) == (64, 64, 64)
        first = export(server, {"prompt": PROMPT})
        assert first.headers["content-type"] == "application/octet-stream"
        bundles = [first.body, export(server, {"messages": MESSAGES}).body]
        assert export(server, {"prompt": PROMPT}).body == bundles[0], "a bundle depends on its prompt only"
    with running_server(settings=settings(tmp_path / "two")) as server:
        for data in bundles:
            taken = take(server, data).value
            assert taken["added"] == taken["blocks"] > 0 == taken["known"] + taken["left_out"]
        assert complete(server, [*PROMPT, 7]) == (expected, {"cached_tokens": 64, "by_tier": {"device": 0, "disk": 64}})
        again = server.post("/v1/chat/completions", chat)
        assert again.value["choices"] == answer.value["choices"]
        assert again.value["usage"]["prompt_tokens_details"]["by_tier"]["disk"] > 0
        assert take(server, bundles[0]).value["known"] == 4, "nothing is there twice"
        assert export(server, {"prompt": PROMPT}).body == bundles[0]
    with running_server(settings=settings(tmp_path / "two")) as server:
        assert complete(server, [*PROMPT, 7])[1]["by_tier"] == {"device": 0, "disk": 64}, "also after a restart"


def test_a_bundle_of_one_tenant_becomes_that_of_who_takes_it_in(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    logs = [tmp_path / name for name in ("first", "second")]
    with running_server(settings=settings(tmp_path / "one", step_log=logs[0]), api_keys_file=str(keys)) as server:
        complete(server, PROMPT, "bob")
        complete(server, PROMPT, "bob")
        answer = export(server, {"prompt": PROMPT}, "alice")
        data, salted = answer.body, export(server, {"prompt": PROMPT, "cache_salt": "mine"}, "alice").body
        assert answer.status == 200 and data == salted
        salts = [tenant.scope.salt.encode() for tenant in server.services.tenants.each]
        assert not any(text in data for text in [b"alice", b"bob", *salts]), "it names nobody"
        assert [export(server, {"prompt": PROMPT}, key).error["code"] for key in ("bob", "carl")] == [
            "operator_required",
            "not_persistent",
        ]
        assert take(server, data, "carl").error["message"].endswith("set persist: true for it in the keys file")
        warm = {"authorization": "Bearer bob", **JSON}
        assert server.ask("POST", "/cache/warm", b'{"prompt": "a"}', warm).status == 403
        alice = server.services.tenants.find(b"alice")
    with running_server(settings=settings(tmp_path / "two", step_log=logs[1]), api_keys_file=str(keys)) as server:
        assert take(server, data, "bob").status == 403
        assert take(server, data, "alice", "?cache_salt=mine").value["added"] == 4
        assert [complete(server, PROMPT, key)[1]["cached_tokens"] for key in ("bob", "alice")] == [0, 0]
        assert complete(server, PROMPT, "alice", cache_salt="mine")[1]["by_tier"] == {"device": 0, "disk": 64}
    assert alice is not None
    for log in logs:
        assert alice.scope.salt.encode() not in log.read_bytes()
        with log.open("rb") as file:
            assert replay(file) > 3


def entries(data: bytes) -> tuple[dict[str, Any], list[tuple[KeptBlock, bytes]]]:
    """Return the meta and the blocks of a bundle."""
    size = beginning_size(data[:HEAD_BYTES])
    assert size is not None
    source = iter([data[at : at + count] for at, count in ((0, 20), (20, size - 24), (size - 4, 4))])
    found = read_beginning(lambda _: next(source))
    assert found is not None
    meta, blocks = found[0], []
    head = record_bytes(meta["block_size"])
    for at in range(size, len(data), head + meta["block_bytes"]):
        record = read_record(data[at : at + head], 0, meta["block_size"])
        assert record is not None
        blocks.append((record.block, data[at + head : at + head + meta["block_bytes"]]))
    return meta, blocks


def written(meta: dict[str, Any], blocks: list[tuple[KeptBlock, bytes]], count: int | None = None) -> bytes:
    """Return a bundle; all its checksums are right."""
    body = [write_record(block, zlib.crc32(data), meta["block_size"]) + data for block, data in blocks]
    return beginning_bytes(meta, len(blocks) if count is None else count) + b"".join(body)


def lies(data: bytes) -> dict[str, tuple[bytes, str]]:
    """Return bundles that are not what they say, and a word of the answer to each."""
    meta, blocks = entries(data)
    first, more = blocks[0][0], blocks[1:]
    token = array("i", [10**6, *array("i", first.tokens)[1:]]).tobytes()
    other = meta | {"identity": meta["identity"] | {"weights": "0"}}
    return {
        "empty": (b"", "ends within"),
        "text": (b"{}" * 100, "not a bundle"),
        "a beginning of a terabyte": (struct.pack("<8sIQ", b"quireKV1", 1 << 31, 4) + bytes(99), "not a bundle"),
        "more blocks than it has": (written(meta, blocks, 9), "ends within block 4"),
        "fewer blocks than it has": (written(meta, blocks, 3), "longer"),
        "as many as nothing holds": (written(meta, blocks, 1 << 60), "--disk-cache-size"),
        "another model": (written(other, blocks), "another engine"),
        "other sizes": (written(meta | {"block_bytes": 1 << 50}, blocks), "another engine"),
        "a token that is none": (written(meta, [(replace(first, tokens=token), blocks[0][1]), *more]), "token"),
        "an orphan": (written(meta, more), "no parent"),
        "a group that is none": (written(meta, [(replace(first, group=7), blocks[0][1]), *more]), "no parent"),
        "two of one number": (written(meta, [*blocks, (replace(first, serial=4), blocks[0][1])]), "number of another"),
        "a tenant's": (written(meta, [(replace(first, scope=CacheScope("bob", "x")), blocks[0][1]), *more]), "tenant"),
    }


def test_a_bundle_that_lies_is_refused_in_one_line(bundle: bytes, target: tuple[RunningServer, Path]) -> None:
    server, folder = target
    bad = lies(bundle)
    for at in range(0, len(bundle), max(1, len(bundle) // 40)):
        bad[f"cut at {at}"] = (bundle[:at], "")
        flipped = bytearray(bundle)
        flipped[at] ^= 1
        bad[f"flipped at {at}"] = (bytes(flipped), "")
    for name, (data, word) in bad.items():
        answer = take(server, data)
        assert answer.status == 400, name
        assert word in answer.error["message"] and "\n" not in answer.error["message"], name
        assert answer.error["param"] == "body"
    assert not list(folder.glob("incoming-*"))
    assert complete(server, PROMPT, max_tokens=1)[1]["cached_tokens"] == 0, "nothing of it was taken in"
    server.llm.reset_prefix_cache()


def test_a_body_that_cannot_be_is_refused_before_it_is_read(target: tuple[RunningServer, Path]) -> None:
    server, _ = target
    assert server.ask("POST", "/cache/import", b"{}", JSON).status == 415
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.putrequest("POST", "/cache/import")
        connection.putheader("content-type", "application/octet-stream")
        connection.putheader("content-length", str(1 << 50))
        connection.endheaders()
        answer = Answer.of(connection.getresponse())
    assert answer.status == 413 and "--disk-cache-size" in answer.error["message"]
    assert "one block" in export(server, {"prompt": PROMPT[:5]}).error["message"]
    assert "at most 1" in export(server, {"prompt": [PROMPT, PROMPT]}).error["message"]
    assert export(server, {}).error["param"] == "prompt"


def test_a_client_that_leaves_leaves_nothing_and_others_wait_their_turn(
    bundle: bytes, target: tuple[RunningServer, Path]
) -> None:
    server, folder = target
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.putrequest("POST", "/cache/import")
        connection.putheader("content-type", "application/octet-stream")
        connection.putheader("content-length", str(len(bundle)))
        connection.endheaders(bundle[: len(bundle) // 2])
        wait_until(lambda: len(list(folder.glob("incoming-*"))) == 1)
        refused = take(server, bundle)
        assert (refused.status, refused.error["code"]) == (429, "slow_down")
        assert complete(server, [9] * 40)[1]["cached_tokens"] in (0, 32), "others go on"
    wait_until(lambda: not list(folder.glob("incoming-*")))
    wait_until(lambda: take(server, bundle).status == 200)
    assert complete(server, PROMPT)[1]["by_tier"] == {"device": 0, "disk": 64}


def test_a_body_that_trickles_gives_its_turn_back(bundle: bytes, tmp_path: Path) -> None:
    with running_server(settings=settings(tmp_path), body_timeout_s=1.0) as server:
        fields = {**BUNDLE, "content-length": str(len(bundle))}
        with socket.create_connection(("127.0.0.1", server.port), timeout=0.1) as connection:
            connection.sendall(head("POST", "/cache/import", fields))
            for at in range(len(bundle)):
                connection.sendall(bundle[at : at + 1])
                try:
                    answer = read_answer(connection, 0.0)
                    break
                except TimeoutError:
                    pass
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert "next MiB" in answer.error["message"]
        assert take(server, bundle).value["added"] == 4


def test_a_bundle_evicts_what_was_used_longest_ago(bundle: bytes, tmp_path: Path) -> None:
    room = settings(tmp_path, disk_cache_size=str(4 * (4096 + 512)), disk_write="always", block_size=16)
    meta, _ = entries(bundle)
    room["disk_cache_size"] = str(4 * (-(-meta["block_bytes"] // 4096) * 4096 + record_bytes(16)))
    with running_server(settings=room) as server:
        server.post("/cache/warm", {"prompt": [11] * 64})
        assert take(server, bundle).value["added"] == 4
        assert complete(server, PROMPT)[1]["by_tier"] == {"device": 0, "disk": 64}
        refused = export(server, {"prompt": [3] * 100})
        assert (refused.status, refused.error["code"]) == (503, "prompt_not_kept")


def test_jobs_are_decisions_that_a_step_log_replays(bundle: bytes, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_server(settings=settings(tmp_path / "cache", step_log=log)) as server:
        assert take(server, bundle).value["added"] == 4
        assert complete(server, [*PROMPT, 7])[1]["by_tier"]["disk"] == 64
        assert export(server, {"prompt": PROMPT}).status == 200
    with log.open("rb") as file:
        assert replay(file) > 3


def test_a_start_removes_what_a_killed_server_has_left(tmp_path: Path) -> None:
    (tmp_path / "incoming-left").write_bytes(b"half a bundle")
    kept = Spool(tmp_path)
    remove_abandoned(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [kept.path.name], "that of another server stays"
    kept.close()
    kept.close()
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_full_or_gone_is_told_in_one_line(
    bundle: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with running_server(settings=settings(tmp_path / "cache")) as server:
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            answer = take(server, bundle)
            assert (answer.status, answer.error["code"]) == (500, "disk_cache_fails")
            assert "No space left on device" in answer.error["message"]
        assert export(server, {"prompt": PROMPT}).body == bundle
        shutil.rmtree(tmp_path / "cache")
        for answer in (take(server, bundle), export(server, {"prompt": PROMPT})):
            assert (answer.status, answer.error["code"]) == (500, "disk_cache_fails")
        assert complete(server, PROMPT)[1]["cached_tokens"] == 64, "the engine goes on"


def test_a_disk_that_writes_nothing_holds_only_the_call_up(
    bundle: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from quire.compute.worker.store.slot_file import SlotFile

    go_on, write = threading.Event(), SlotFile.write

    def hang(*arguments: Any) -> None:
        assert go_on.wait(300)
        write(*arguments)

    monkeypatch.setattr(SlotFile, "write", hang)
    with running_server(settings=settings(tmp_path), request_timeout_s=1.0) as server:
        answer = take(server, bundle)
        assert (answer.status, answer.error["code"]) == (504, "deadline_exceeded")
        assert complete(server, [9] * 40, max_tokens=1)[1]["cached_tokens"] == 0
        assert not list(tmp_path.glob("incoming-*"))
        go_on.set()


def test_bundles_go_from_process_to_process_and_outlive_a_kill(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    fields = {"prompt": [*PROMPT, 7], "max_tokens": 6, "temperature": 0}
    with served_process(folders[0], "--disk-cache", str(folders[0] / "cache")) as server:
        expected = server.complete(fields)["choices"]
        data = posted(server, "/cache/export", json.dumps({"prompt": PROMPT}).encode(), JSON)
    with served_process(folders[1], "--disk-cache", str(folders[1] / "cache")) as server:
        assert json.loads(posted(server, "/cache/import", data, BUNDLE))["added"] == 4
        server.kill()
    with served_process(folders[1], "--disk-cache", str(folders[1] / "cache")) as server:
        answer = server.complete(fields)
        assert answer["choices"] == expected
        assert answer["usage"]["prompt_tokens_details"]["by_tier"] == {"device": 0, "disk": 64}


def test_an_engine_that_dies_under_an_import_ends_only_that_call(tmp_path: Path, bundle: bytes) -> None:
    cache = tmp_path / "cache"
    with served_process(tmp_path, "--disk-cache", str(cache)) as server:
        with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
            connection.putrequest("POST", "/cache/import")
            connection.putheader("content-type", "application/octet-stream")
            connection.putheader("content-length", str(len(bundle)))
            connection.endheaders(bundle[: len(bundle) // 2])
            wait_until(lambda: list(cache.glob("incoming-*")))
            (engine,) = engines_of(server.process.pid)
            os.kill(engine, signal.SIGKILL)
            connection.send(bundle[len(bundle) // 2 :])
            answer = Answer.of(connection.getresponse())
        assert answer.status in (200, 503), "200: it was started again meanwhile"
        wait_until(lambda: not list(cache.glob("incoming-*")))
        server.wait_ready()
        taken = json.loads(posted(server, "/cache/import", bundle, BUNDLE))
        assert taken["added"] + taken["known"] == 4
        details = server.complete({"prompt": PROMPT, "max_tokens": 1})["usage"]["prompt_tokens_details"]
        assert details["by_tier"] == {"device": 0, "disk": 64}


def engines_of(server: int) -> list[int]:
    """Return the engines among the processes that a server has started."""
    found = []
    for task in Path(f"/proc/{server}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"engine_host" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def posted(server: ServedProcess, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("POST", path, body, dict(headers))
        answer = connection.getresponse()
        assert answer.status == 200
        return answer.read()
