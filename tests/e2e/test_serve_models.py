"""Several models in one server, over HTTP, with engines in processes of their own."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.guide import GUIDE_FOLDER
from quire.serve.app import make_app
from quire.serve.config import ServerConfig
from quire.serve.loading.build import MAX_READING, make_model_set
from quire.serve.loading.folder import models_in
from quire.serve.loading.model_set import ModelSet
from quire.serve.server import Server, listen
from quire.serve.tenants import ANYBODY
from support.server_thread import Answer, in_thread
from support.waiting import wait_until

ASK: dict[str, Any] = {"prompt": "A block", "max_tokens": 3, "temperature": 0}


class ManyModels:
    """A server of several models, and ways to ask it."""

    def __init__(self, port: int, models: ModelSet, key: str = "") -> None:
        self.port = port
        self.models = models
        self.key = key

    def ask(self, method: str, path: str, fields: Any = None, *, key: str = "") -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        with closing(connection):
            body = None if fields is None else json.dumps(fields)
            headers = {"content-type": "application/json"}
            if key or self.key:
                headers["authorization"] = f"Bearer {key or self.key}"
            connection.request(method, path, body, headers)
            return Answer.of(connection.getresponse())

    def complete(self, model: str, **fields: Any) -> Answer:
        return self.ask("POST", "/v1/completions", {"model": model, **ASK, **fields})

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.ask("GET", "/v1/models").value["data"]}

    def loaded(self) -> list[str]:
        return [each["name"].removesuffix(":latest") for each in self.ask("GET", "/api/ps").value["models"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("models")
    for name in ("ada", "bob", "torn"):
        shutil.copytree(GUIDE_FOLDER, top / name)
    (top / "torn" / "tokenizer.json").write_text("{")
    shutil.copytree(GUIDE_FOLDER, top / "wrong")
    (top / "wrong" / "config.json").write_text("{")
    (top / "notes").mkdir()
    return top


@contextmanager
def many_models(folder: Path, *, memory: str = "900MiB", key: str = "", **config: Any) -> Iterator[ManyModels]:
    settings: dict[str, Any] = {"kv_memory": "8MiB", "num_threads": 1, "max_memory": memory}
    configs = [EngineConfig(model=path, **settings) for path in ("guide", *models_in(str(folder)).paths)]
    server_config = ServerConfig(**({"port": 0, "drain_timeout_s": 0.0, "access_log": False} | config))
    models = make_model_set(configs, server_config, SystemClock(), num_named=1)
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    with in_thread(Server(models, make_app(models), announce=lambda _: None), listener):
        server = ManyModels(port, models, key)
        wait_until(lambda: server.states()["guide"] == "ready")
        yield server


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[ManyModels]:
    with many_models(folder, keep_alive="never") as server:
        yield server


@pytest.fixture
def server(running: ManyModels) -> ManyModels:
    """A server that has only its first model loaded."""
    for name in ("ada", "bob"):
        assert running.ask("POST", "/api/generate", {"model": name, "keep_alive": 0}).status == 200
    wait_until(lambda: running.loaded() == ["guide"])
    return running


def test_models_are_loaded_when_they_are_asked_for(server: ManyModels) -> None:
    assert server.states() == {"guide": "ready", "ada": "unloaded", "bob": "unloaded", "torn": "unloaded"}
    first = server.complete("guide").value["choices"][0]["text"]
    answer = server.complete("ada")
    assert (answer.status, answer.value["model"]) == (200, "ada")
    assert answer.value["choices"][0]["text"] == first, "it is the same model"
    assert server.states()["ada"] == "ready"
    assert server.loaded() == ["guide", "ada"]
    listed = [each["name"] for each in server.ask("GET", "/api/tags").value["models"]]
    assert listed == ["guide:latest", "ada:latest", "bob:latest", "torn:latest"]
    assert server.ask("GET", "/readyz").status == 200
    ids = server.ask("POST", "/tokenize", {"model": "bob", "prompt": "A block"})
    assert (ids.status, server.loaded()) == (200, ["guide", "ada", "bob"])


def test_a_broken_model_fails_alone_and_an_unknown_one_is_told_near_names(server: ManyModels) -> None:
    for name, reason in (("torn", "tokenizer.json"), ("wrong", "config.json")):
        refused = server.complete(name)
        assert (refused.status, refused.value["error"]["code"]) == (500, "model_not_loadable")
        assert reason in refused.value["error"]["message"]
    unknown = server.complete("guid")
    assert unknown.status == 404
    assert "'guide'" in unknown.value["error"]["message"]
    shown = server.ask("POST", "/api/show", {"model": "torn"})
    assert (shown.status, "cannot be loaded" in shown.value["error"]) == (500, True)
    assert server.complete("guide").status == 200


def test_a_description_needs_no_engine(server: ManyModels) -> None:
    shown = server.ask("POST", "/api/show", {"model": "bob"}).value
    assert shown["template"]
    assert "completion" in shown["capabilities"]
    assert server.loaded() == ["guide"]


def test_a_tenant_that_reads_about_models_holds_up_only_itself(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("".join(f"- {{name: {name}, key: key-of-{name}}}\n" for name in "ab"))
    order, begun, may_go = list[str](), threading.Event(), threading.Event()

    def held(name: str, read: Callable[[], Any]) -> Any:
        order.append(name)
        begun.set()
        assert may_go.wait(300)
        return read()

    with many_models(folder, key="key-of-a", api_keys_file=str(keys)) as server, ThreadPoolExecutor(18) as clients:
        shown = partial(server.ask, "POST", "/api/show")
        for name in ("ada", "bob"):
            model: Any = server.models.find(name, ANYBODY).model
            monkeypatch.setattr(model, "_open", partial(held, name, model._open))
        try:
            of_a = [clients.submit(shown, {"model": "ada"})]
            assert begun.wait(300)
            of_a += [clients.submit(shown, {"model": "ada"}) for _ in range(MAX_READING)]
            wait_until(lambda: model._load_pool.num_waiting == MAX_READING)
            refused = shown({"model": "ada"})
            assert (refused.status, "retry-after" in refused.headers) == (429, True)
            of_b = clients.submit(shown, {"model": "bob"}, key="key-of-b")
            wait_until(lambda: model._load_pool.num_waiting == MAX_READING + 1)
        finally:
            may_go.set()
        assert of_b.result(300).status == 200
        assert [each.result(300).status for each in of_a] == [200] * (1 + MAX_READING)
        assert order[:2] == ["ada", "bob"], "b waits for one of a's, not for all"


def test_a_stream_goes_on_while_another_model_is_loaded(server: ManyModels) -> None:
    """By the order of events: tokens of the stream come between the start of the load and its end."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    body = {"model": "guide", "prompt": "A", "max_tokens": 700, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    stream = connection.getresponse()
    assert stream.readline().startswith(b"data: ")
    events: list[str] = []
    loading = server.models.find("ada", ANYBODY).model
    other = threading.Thread(target=lambda: events.append(f"answer {server.complete('ada').status}"))
    other.start()
    num_while_loading = 0
    for line in stream:
        if line.startswith(b"data: ") and loading.state.value == "starting":
            num_while_loading += 1
    other.join(300)
    connection.close()
    assert events == ["answer 200"]
    assert num_while_loading > 0


def test_ollamas_keep_alive_loads_keeps_and_unloads(server: ManyModels) -> None:
    whole = {"stream": False}
    loaded = server.ask("POST", "/api/generate", {"model": "ada", "keep_alive": -1, **whole}).value
    assert (loaded["done_reason"], server.loaded()) == ("load", ["guide", "ada"])
    expires = {each["name"]: each["expires_at"] for each in server.ask("GET", "/api/ps").value["models"]}
    assert expires["ada:latest"] > "2100"
    refused = server.ask("POST", "/api/generate", {"model": "ada", "keep_alive": "soon"})
    assert (refused.status, "keep_alive is" in refused.value["error"]) == (400, True)
    gone = server.ask("POST", "/api/generate", {"model": "ada", "keep_alive": 0, **whole}).value
    assert gone["done_reason"] == "unload"
    wait_until(lambda: server.loaded() == ["guide"])
    answer = server.ask("POST", "/api/chat", {"model": "bob", "keep_alive": 0, **whole, "messages": [user("Hi")]})
    assert answer.value["done_reason"] in ("stop", "length")
    wait_until(lambda: server.loaded() == ["guide"])
    unloaded = server.ask("POST", "/api/chat", {"model": "bob", "keep_alive": 0, "messages": []}).value
    assert unloaded["done_reason"] == "unload"
    assert server.loaded() == ["guide"], "what is not loaded is not loaded to be unloaded"


def test_an_idle_model_is_unloaded_and_comes_back(folder: Path) -> None:
    with many_models(folder, keep_alive="200ms") as server:
        assert server.complete("guide").status == 200
        wait_until(lambda: server.loaded() == [])
        assert server.complete("guide").status == 200


def test_where_memory_is_short_idle_models_make_room(folder: Path) -> None:
    with many_models(folder, memory="30MiB") as server:
        assert server.complete("ada").status == 200
        assert server.loaded() == ["ada"]
        assert server.complete("guide").status == 200
        assert server.loaded() == ["guide"]


def test_the_crash_of_one_engine_leaves_the_others_serving(server: ManyModels) -> None:
    assert server.complete("ada").status == 200
    model: Any = server.models.find("ada", ANYBODY).model
    os.kill(model._model.engine_process_id, signal.SIGKILL)
    assert server.complete("guide").status == 200
    wait_until(lambda: server.complete("ada").status == 200)


def test_numbers_are_told_of_each_model(server: ManyModels) -> None:
    def told(metric: str) -> dict[str, int]:
        text = server.ask("GET", "/metrics").body.decode()
        found = re.findall(rf'^quire_{metric}{{model_name="(\w+)"}} (\d+)$', text, re.MULTILINE)
        return {name: int(number) for name, number in found}

    before = told("generated_tokens_total")
    assert server.complete("ada").status == 200
    assert told("model_loaded") == {"guide": 1, "ada": 1, "bob": 0, "torn": 0}
    assert told("generated_tokens_total") == before | {"ada": before["ada"] + 3}
    assert server.ask("GET", "/load").value["num_waiting"] == 0
    assert server.ask("GET", "/props?model=ada").value["model_alias"] == "ada"
    assert server.ask("GET", "/live?model=none").status == 404


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
