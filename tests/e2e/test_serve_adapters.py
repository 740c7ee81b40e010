"""Adapters over HTTP: each is a model of its own name."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cli import main
from quire.compute.models import read_model
from quire.compute.models.source import ModelFolder
from quire.core.clock import SystemClock
from quire.core.config import EngineConfig
from quire.core.errors import ExecutionError, InvalidConfigError, InvalidRequestError
from quire.engine.door import Ticket
from quire.engine.process.adapter_set import MAX_WAITING
from quire.engine.records.stats import ModelState
from quire.engine.replicas.settings import ReplicaSettings
from quire.engine.replicas.supervised import SupervisedLLM
from quire.guide import GUIDE_FOLDER
from quire.serve.config import ServerConfig
from quire.serve.loading.build import make_model_set
from quire.serve.tenants import read_tenants
from support.adapters import adapter_tensors, write_adapter
from support.live_lines import LiveLines
from support.server import JSON, RunningServer, running_server
from support.server_thread import Answer
from support.waiting import wait_until

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
    assert "none with several models" in refused("guide", str(folder.parent))


def test_the_command_line_computes_with_the_adapter_that_it_names(
    folder: Path, server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "guide", "--prompt", PROMPT, "--max-tokens", "12", "--temperature", "0", "--raw"]
    assert main([*arguments, "--adapter", str(folder), "--kv-memory", "8MiB", "--quiet"]) == 0
    answer = server.post("/v1/completions", FIELDS | {"model": "tune"}).value
    assert answer["choices"][0]["text"].strip() in capsys.readouterr().out


def test_the_command_line_makes_vectors_with_the_adapter_that_it_names(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LLM("guide", adapter={"tune": folder}, pooling="mean", kv_memory="8MiB") as llm:
        plain, tuned = (llm.embed([PROMPT], adapter=adapter, use_tqdm=False)[0].embedding for adapter in (None, "tune"))
    arguments = ["embed", "guide", "--pooling", "mean", "--prompt", PROMPT, "--kv-memory", "8MiB", "--quiet"]
    for more, expected in (((), plain), (("--adapter", str(folder)), tuned)):
        assert main([*arguments, *more]) == 0
        assert json.loads(capsys.readouterr().out)["embedding"] == expected
    assert plain != tuned


def test_operators_load_and_unload_below_the_root_only(folder: Path, tmp_path: Path, server: RunningServer) -> None:
    root = tmp_path / "root"
    shutil.copytree(folder, root / "one")
    (root / "out").symlink_to(folder)
    (root / "two").mkdir()
    for file in folder.iterdir():
        (root / "two" / file.name).symlink_to(file)
    other = write_adapter(root / "other", adapter_tensors(read_model(ModelFolder(GUIDE_FOLDER)).spec, seed=9))
    write_adapter(root / "bad", {}, {"use_dora": True})
    tuned = server.post("/v1/completions", FIELDS | {"model": "tune"}).value["choices"][0]["text"]
    settings = {"adapter_memory": "4MiB", "adapter": {"first": folder}}
    with running_server(settings=settings, adapter_root=str(root)) as running:

        def load(name: str, path: str) -> Answer:
            return running.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

        loaded = load("mine", "one")
        assert loaded.value == {"status": "loaded", "lora_name": "mine", "rank": 8, "bytes": loaded.value["bytes"]}
        assert running.post("/v1/completions", FIELDS | {"model": "mine"}).value["choices"][0]["text"] == tuned
        assert load("mine", str(root / "one")).status == 200, "the same again"
        refused = {
            ("mine", "other"): (409, "name_is_used"),
            ("guide", "one"): (409, "name_is_used"),
            ("guide:latest", "one"): (409, "name_is_used"),
            ("mine:latest", "one"): (409, "name_is_used"),
            ("a name", "one"): (400, "invalid_value"),
            ("x", "bad"): (400, "invalid_value"),
            ("x", ""): (400, "invalid_value"),
            ("x", ".."): (400, "invalid_value"),
            ("x", str(folder)): (400, "invalid_value"),
            ("x", "out"): (400, "invalid_value"),
            ("x", "two"): (400, "invalid_value"),
            ("x", "nowhere"): (400, "invalid_value"),
            ("x", "one/adapter_config.json"): (400, "invalid_value"),
            ("x", "\0"): (400, "invalid_value"),
        }
        for (name, path), expected in refused.items():
            answer = load(name, path)
            assert (answer.status, answer.error["code"]) == expected, (name, path)
            assert str(tmp_path) not in answer.error["message"]
        assert "use_dora" in load("x", "bad").error["message"]
        assert [card["id"] for card in running.get("/v1/models").value["data"]] == ["guide", "first", "mine"]
        assert running.post("/v1/unload_lora_adapter", {"lora_name": "mine"}).value["status"] == "unloaded"
        assert running.post("/v1/unload_lora_adapter", {"lora_name": "mine"}).status == 404
        assert running.post("/v1/completions", FIELDS | {"model": "mine"}).status == 404
        assert load("mine", other.name).status == 200
        assert running.post("/v1/completions", FIELDS | {"model": "mine"}).value["choices"][0]["text"] != tuned
    fixed = server.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "one"})
    assert (fixed.status, fixed.error["code"]) == (403, "adapters_are_fixed")


def test_a_disk_that_does_not_answer_holds_up_no_other_call(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, is_reading = threading.Event(), threading.Event()

    def iterdir(path: Path) -> Iterator[Path]:
        is_reading.set()
        gate.wait(300)
        return map(path.joinpath, os.listdir(path))

    shutil.copytree(folder, tmp_path / "one")
    settings = {"adapter_memory": "4MiB", "adapter": {"first": folder}}
    served = running_server(settings=settings, adapter_root=str(tmp_path))
    with served as running, ThreadPoolExecutor(2 + MAX_WAITING) as pool:

        def load(name: str) -> Answer:
            return running.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": "one"})

        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", iterdir)
            loads = [pool.submit(load, "mine")]
            assert is_reading.wait(300), loads[0].result()
            assert running.post("/v1/completions", FIELDS).status == 200
            loads += [pool.submit(load, "mine") for _ in range(1 + MAX_WAITING)]  # one more than may wait
            (refused,), _ = wait(loads, 300, FIRST_COMPLETED)
            gate.set()
            assert sorted(each.result().status for each in loads) == [200] * (1 + MAX_WAITING) + [503]
        assert refused.result().error["code"] == "too_many_adapters"
        assert running.post("/v1/completions", FIELDS | {"model": "mine"}).status == 200


def test_an_adapter_that_is_unloaded_serves_those_who_have_it(folder: Path) -> None:
    with running_server(settings={"adapter": {"tune": folder}, "adapter_memory": "4MiB"}, adapter_root="/") as running:
        fields = FIELDS | {"model": "tune", "max_tokens": 200}
        expected = running.post("/v1/completions", fields).value["choices"][0]["text"]
        with running.client() as client:
            stream = client.completions.create(
                stream=True,
                **{name: fields[name] for name in fields if name != "ignore_eos"},
                extra_body={"ignore_eos": True},
            )
            first = next(iter(stream)).choices[0].text
            assert running.post("/v1/unload_lora_adapter", {"lora_name": "tune"}).status == 200
            assert first + "".join(chunk.choices[0].text for chunk in stream) == expected
        assert running.post("/v1/completions", fields).status == 404
        assert "tune" not in running.llm.adapters
        wait_until(lambda: not running.llm.engine.stats().adapters)  # the engine drops it between steps


def test_those_used_last_are_in_memory(folder: Path) -> None:
    spec = read_model(ModelFolder(GUIDE_FOLDER)).spec
    others = [write_adapter(folder.parent / f"other{n}", adapter_tensors(spec, seed=n, rank=8)) for n in (2, 3)]
    named = dict(zip(("one", "two", "three"), (folder, *others), strict=True))
    texts: dict[str, list[int]] = {}
    with LLM("guide", kv_memory="4MiB", adapter=named, num_threads=1) as llm:
        size = llm.adapters["one"].num_bytes
        assert len(llm.stats().adapters) == 3
        for name in named:
            texts[name] = (
                llm.generate(PROMPT, adapter=name, max_tokens=6, temperature=0, use_tqdm=False)[0].outputs[0].token_ids
            )
    assert len({tuple(text) for text in texts.values()}) == 3
    with LLM("guide", kv_memory="4MiB", adapter=named, adapter_memory=2 * size, num_threads=1) as llm:
        digest = {name: facts.digest for name, facts in llm.adapters.items()}
        assert set(llm.stats().adapters) == {digest["one"], digest["two"]}
        for name in ("two", "one", "three", "one", "two", "three"):
            found = llm.generate(PROMPT, adapter=name, max_tokens=6, temperature=0, use_tqdm=False)
            assert found[0].outputs[0].token_ids == texts[name]
            assert digest[name] in llm.stats().adapters and len(llm.stats().adapters) == 2
        assert set(llm.stats().adapters) == {digest["two"], digest["three"]}
        stream = llm.stream(PROMPT, adapter="two", max_tokens=6, temperature=0)
        other = llm.stream(PROMPT, adapter="three", max_tokens=6, temperature=0)
        next(stream), next(other)
        with pytest.raises(ExecutionError, match="leave no room in adapter_memory"):
            llm.generate(PROMPT, adapter="one", max_tokens=2, use_tqdm=False)
        stream.close()
        assert llm.generate(PROMPT, adapter="one", max_tokens=2, use_tqdm=False)[0].outputs[0].token_ids
        other.close()
    with LLM("guide", kv_memory="4MiB", adapter_memory=size, num_threads=1) as llm:
        facts = llm.load_adapter("tune", folder)
        assert llm.load_adapter("again", folder) == facts, "equal files take no more"
        llm.load_adapter("other", others[0])
        assert len(llm.stats().adapters) == 1 and set(llm.adapters) == {"tune", "again", "other"}
        assert (
            llm.generate(PROMPT, adapter="tune", max_tokens=6, temperature=0, use_tqdm=False)[0].outputs[0].token_ids
            == texts["one"]
        )
        large = write_adapter(folder.parent / "large", adapter_tensors(spec, rank=40))
        with pytest.raises(InvalidRequestError, match=r"\(adapter_memory\)"):
            llm.load_adapter("large", large)
        llm.unload_adapter("tune")
        llm.unload_adapter("again")
        assert not llm.stats().adapters


def test_many_adapters_take_turns_in_little_memory(folder: Path) -> None:
    """Eight names, three in memory, calls for all at once: each gets the text of its own adapter."""
    spec = read_model(ModelFolder(GUIDE_FOLDER)).spec
    folders = {
        f"a{n}": write_adapter(folder.parent / f"many{n}", adapter_tensors(spec, seed=20 + n, rank=4)) for n in range(8)
    }
    with LLM("guide", kv_memory="8MiB", adapter=folders, num_threads=1) as llm:
        size = llm.adapters["a0"].num_bytes
        sampling: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "use_tqdm": False, "ignore_eos": True}
        expected = {name: llm.generate(PROMPT, adapter=name, **sampling)[0].outputs[0].text for name in folders}
    with running_server(settings={"adapter": folders, "adapter_memory": 3 * size}) as running:
        order = [f"a{n}" for n in random.Random(5).choices(range(8), k=24)]
        fields = FIELDS | {"max_tokens": 8}
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda name: running.post("/v1/completions", fields | {"model": name}), order))
        for name, answer in zip(order, answers, strict=True):
            assert answer.status == 200, answer.error
            assert answer.value["choices"][0]["text"] == expected[name], name
        running.wait_until_idle()
        assert len(running.llm.engine.stats().adapters) <= 3


def test_an_engine_that_is_started_again_has_what_it_had(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(folder, root / "one")

    async def work() -> tuple[str, str]:
        config = EngineConfig(model="guide", kv_memory="4MiB", num_threads=1, adapter_memory="2MiB")
        async with SupervisedLLM(config) as llm:
            await llm.load_adapter("mine", lambda: str(root / "one"))

            async def text() -> str:
                sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
                prepared = await llm.prepare(PROMPT, sampling, Ticket(adapter="mine"))
                return "".join([delta.text async for each in llm.deltas(prepared) for delta in each.outputs])

            before, process = await text(), llm.engine_process_id
            assert process is not None
            os.kill(process, signal.SIGKILL)
            while llm.engine_process_id in (None, process) or llm.state is not ModelState.READY:
                await asyncio.sleep(0.01)
            return before, await text()

    before, after = asyncio.run(work())
    assert before == after != ""


def test_the_text_of_an_adapter_goes_on_in_another_engine(folder: Path) -> None:
    async def work() -> None:
        config = EngineConfig(model="guide", kv_memory="4MiB", num_threads=1, adapter={"mine": str(folder)})
        async with SupervisedLLM(config, replicas=ReplicaSettings(2)) as llm:
            replicas, left = llm.replicas.replicas, 0
            while not all(replica.is_ready for replica in replicas):
                await asyncio.sleep(0.01)

            async def text(number: int) -> str:
                nonlocal left
                sampling, found = SamplingParams(max_tokens=200, seed=number, ignore_eos=True), ""
                ticket = Ticket(adapter="mine" if number % 2 else None)
                async for each in llm.deltas(await llm.prepare(PROMPT, sampling, ticket)):
                    found += "".join(delta.text for delta in each.outputs)
                    if left and replicas[left - 1].process_id is not None:
                        left -= 1
                        os.kill(replicas[left].process_id or -1, signal.SIGKILL)
                return found

            calm = await asyncio.gather(*map(text, range(6)))
            assert len(set(calm)) == 6
            left = 2
            assert await asyncio.gather(*map(text, range(6))) == calm
            assert [replica.num_restarts for replica in replicas] == [1, 1]

    asyncio.run(work())


def test_a_key_may_be_limited_to_names(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        "- {name: tuner, key: tuner, models: tune}\n"
        "- {name: plain, key: plain, models: [guide]}\n- {name: all, key: all}\n"
    )
    with running_server(settings={"adapter": {"tune": folder}}, api_keys_file=str(keys)) as running:

        def ask(method: str, path: str, key: str, fields: dict[str, Any] | None = None) -> Answer:
            body = None if fields is None else json.dumps(fields).encode()
            return running.ask(method, path, body, JSON | {"authorization": f"Bearer {key}"})

        for key, names in {"tuner": ["tune"], "plain": ["guide"], "all": ["guide", "tune"]}.items():
            assert [card["id"] for card in ask("GET", "/v1/models", key).value["data"]] == names
            tags = [each["name"] for each in ask("GET", "/api/tags", key).value["models"]]
            assert tags == [f"{name}:latest" for name in names]
            for name in ("guide", "tune", "tune:latest", None):
                fields = FIELDS | ({} if name is None else {"model": name})
                allowed = (name or "guide").removesuffix(":latest") in names
                answer = ask("POST", "/v1/completions", key, fields)
                assert answer.status == (200 if allowed else 404), (key, name)
                if not allowed:
                    shown = re.findall("'([^']+)'", answer.error["message"].partition("but")[2])
                    assert set(shown) <= set(names), "what it may not call, it does not see"
            assert ask("GET", "/v1/models/tune", key).status == (200 if "tune" in names else 404)
            assert ask("GET", f"/props?model={names[0]}", key).value["model_alias"] == names[0]
            with LiveLines(running.port, key, query=f"?model={names[0]}") as lines:
                lines.until(lambda _: True)
                assert (lines.hello["model"], lines.hello["models"]) == (names[0], names[:1])
            for method, path in (("GET", "/v1/models"), ("GET", "/v1/models/tune"), ("GET", "/api/tags")):
                assert "guide" in names or b"guide" not in ask(method, path, key).body
    for wrong in ("[]", "7", "[7]", "''"):
        keys.write_text(f"- {{name: tuner, key: tuner, models: {wrong}}}\n")
        with pytest.raises(InvalidConfigError, match=r"^api_keys_file\[0\]\.models is "):
            read_tenants(ServerConfig(api_keys_file=str(keys)), b"secret")
