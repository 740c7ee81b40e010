"""Adapters over HTTP: each is a model of its own name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.cli import main
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import InvalidConfigError
from quire.guide import GUIDE_FOLDER
from quire.serve.config import ServerConfig
from quire.serve.loading.build import make_model_set
from support.adapters import adapter_tensors, write_adapter
from support.server import RunningServer, running_server

PROMPT = "A block table maps the blocks of a sequence. " * 4
FIELDS: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = read_model(ModelFolder(GUIDE_FOLDER)).spec
    return write_adapter(
        tmp_path_factory.mktemp("adapters") / "tune", adapter_tensors(spec, rank=8), {"lora_alpha": 16}
    )


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with running_server(settings={"adapter": {"tune": folder}}) as running:
        yield running


def test_both_names_are_served_at_once(server: RunningServer, folder: Path) -> None:
    with LLM("guide", kv_memory="8MiB", num_threads=1, adapter={"tune": folder}) as llm:
        expected = {
            name: llm.generate(PROMPT, adapter=adapter, use_tqdm=False, max_tokens=12, temperature=0, ignore_eos=True)
            for name, adapter in (("guide", None), ("tune", "tune"), ("tune:latest", "tune"))
        }
    for name, outputs in expected.items():
        answer = server.post("/v1/completions", FIELDS | {"model": name}).value
        assert answer["choices"][0]["text"] == outputs[0].outputs[0].text
        assert answer["model"] == name
    assert expected["guide"][0].outputs[0].text != expected["tune"][0].outputs[0].text
    assert server.post("/v1/completions", FIELDS).value["choices"][0]["text"] == expected["guide"][0].outputs[0].text


def test_they_are_listed_with_their_base(server: RunningServer) -> None:
    cards = server.get("/v1/models").value["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("guide", "guide", None),
        ("tune", "guide", "guide"),
    ]
    assert server.get("/v1/models/tune").value["parent"] == "guide"
    missing = server.post("/v1/completions", FIELDS | {"model": "tun"})
    assert missing.status == 404 and "tune" in missing.error["message"]


def test_chats_streams_and_other_doors_have_them_too(server: RunningServer) -> None:
    chat = {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 8, "temperature": 0}
    with server.client() as client:
        whole = {
            name: client.chat.completions.create(model=name, **chat).choices[0].message.content
            for name in ("guide", "tune")
        }
        stream = client.chat.completions.create(model="tune", stream=True, **chat)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole["tune"] != whole["guide"]
    ollama = {"model": "tune", "stream": False, "messages": chat["messages"]}
    options = {"temperature": 0, "num_predict": 8}
    found = server.post("/api/chat", ollama | {"options": options}).value
    assert (found["model"], found["message"]["content"]) == ("tune", whole["tune"])


def test_names_that_clash_are_refused_at_the_start(folder: Path) -> None:
    def refused(*models: str, **config: Any) -> str:
        configs = [EngineConfig(model=model, adapter={"tune": folder}) for model in models]
        with pytest.raises(InvalidConfigError) as caught:
            make_model_set(configs, ServerConfig(**config), SystemClock())
        return str(caught.value)

    assert "a name that the model does not have" in refused("guide", served_model_name=("tune",))
    assert "none in a server of several models" in refused("guide", str(folder.parent))


def test_the_command_line_computes_with_the_adapter_that_it_names(
    folder: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "guide", "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0", "--raw"]
    assert main([*arguments, "--adapter", str(folder), "--kv-memory", "8MiB", "--quiet"]) == 0
    answer = server.post("/v1/completions", FIELDS | {"model": "tune"}).value
    assert answer["choices"][0]["text"].strip() in capsys.readouterr().out
