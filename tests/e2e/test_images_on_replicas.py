"""Prompts with images on several engines: they survive a killed engine, and their blocks are exported and imported."""

from __future__ import annotations

import http.client
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from support.image_models import write_image_model
from support.prometheus_text import parse
from support.served_process import ServedProcess, served_process
from support.server import JSON
from support.tiny_images import data_url, file_of, picture
from support.waiting import wait_until

CAT, DOG = (data_url(file_of(picture(90, 60, seed=seed))) for seed in (1, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_model(tmp_path_factory.mktemp("smolvlm"), context=2048)


def about(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    return [{"role": "user", "content": parts}]


def post(server: ServedProcess, path: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("POST", path, body, headers or dict(JSON))
        answer = connection.getresponse()
        found = answer.read()
        assert answer.status == 200, found
        return found


def ask(server: ServedProcess, path: str, **fields: Any) -> Any:
    return json.loads(post(server, path, json.dumps(fields).encode()))


def deltas(server: ServedProcess, url: str, num_tokens: int) -> Iterator[str]:
    """Yield the text of an answer as it comes."""
    fields = {"messages": about(url), "max_tokens": num_tokens, "temperature": 0.8, "seed": 5, "ignore_eos": True}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(fields | {"stream": True}), dict(JSON))
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        for line in answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                event = json.loads(line.removeprefix(b"data: "))
                assert "error" not in event, event
                yield from (choice["delta"].get("content") or "" for choice in event["choices"])


def of_replicas(server: ServedProcess, name: str) -> list[float]:
    """Return a metric of both engines."""
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)) as connection:
        connection.request("GET", "/metrics")
        metric = parse(connection.getresponse().read().decode())[name]
    return [metric.value(replica=replica) for replica in "01"]


def are_ready(server: ServedProcess) -> bool:
    """Whether both engines take requests."""
    return all(of_replicas(server, "quire_replica_ready"))


def text_of(server: ServedProcess, url: str, trouble: Callable[[], None] = lambda: None) -> str:
    """Return an answer; there is trouble once it has begun."""
    text = ""
    for delta in deltas(server, url, 600):
        if delta and not text:
            trouble()
        text += delta
    return text


def test_an_answer_about_an_image_survives_its_engine(folder: Path, tmp_path: Path) -> None:
    with served_process(tmp_path, "--replicas", "2", "--no-enable-prefix-caching", model=str(folder)) as server:
        wait_until(lambda: are_ready(server))
        calm = {url: text_of(server, url) for url in (CAT, DOG)}
        assert calm[CAT] != calm[DOG]

        by_age, killed = [0, 1], list[int]()  # replicas, in the order in which their engines were started

        def kill_busy() -> None:
            texts = of_replicas(server, "quire_replica_texts")
            if 1 in texts:
                age = by_age.index(texts.index(1))
                os.kill(server.engines[age], signal.SIGKILL)
                by_age.append(by_age.pop(age))
                killed.append(age)

        for number, (url, expected) in enumerate(calm.items(), start=1):
            while len(killed) < number:  # an answer can be complete before its beginning is read
                wait_until(lambda: are_ready(server))
                assert text_of(server, url, kill_busy) == expected


def test_blocks_of_an_image_are_exported_and_imported(folder: Path, tmp_path: Path) -> None:
    def served(name: str) -> Any:
        (tmp_path / name).mkdir()
        return served_process(tmp_path / name, "--disk-cache", str(tmp_path / name / "cache"), model=str(folder))

    with served("first") as server:
        (warm,) = ask(server, "/cache/warm", messages=about(CAT))["data"]
        assert warm["cached_tokens"] == warm["stored_tokens"] > 16
        bundle = post(server, "/cache/export", json.dumps({"messages": about(CAT)}).encode())
        expected = ask(server, "/v1/chat/completions", messages=about(CAT), max_tokens=8, temperature=0)
    with served("second") as server:
        taken = json.loads(post(server, "/cache/import", bundle, {"content-type": "application/octet-stream"}))
        assert taken["added"] == warm["stored_tokens"] // 16
        answers = [
            ask(server, "/v1/chat/completions", messages=about(url), max_tokens=8, temperature=0) for url in (DOG, CAT)
        ]
    assert [each["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32 for each in answers] == [False, True]
    assert answers[1]["choices"][0]["message"] == expected["choices"][0]["message"]
