"""The models on this machine: each under a name that leads to it, and none that hides another."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from quire.cli import main
from quire.cli import models as command
from quire.cli.models import UNREAD, ListedModel, list_models
from quire.compute.gguf.source import GgufFile
from quire.compute.models import inventory
from quire.compute.models.hub import resolve_model
from quire.compute.models.inventory import stored_models
from quire.compute.models.source import ModelFolder
from quire.compute.models.stores import model_of_manifest
from quire.core.clock import ManualClock
from support.gguf_models import write_gguf
from support.model_stores import COMMIT, OLDER, VARIABLES, add_to_hub, add_to_ollama
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home without models, in an environment without names of stores and without packages."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("quire.compute.models.inventory.PACKAGES", {})
    monkeypatch.setattr("quire.compute.models.stores.SERVICE_STORE", tmp_path / "service")
    return tmp_path


def fill_stores(home: Path) -> None:
    """Put models into all stores, whole ones and broken ones."""
    llama = write_tiny_llama(home / "llama")
    write_gguf(llama, add_to_ollama(home, "registry.ollama.ai/library/tiny/1b", "1"), "Q8_0")
    write_gguf(llama, add_to_ollama(home, "hf.co/someone/tiny-GGUF/F32", "2"))
    add_to_ollama(home, "registry.ollama.ai/someone/lost/latest", "3")
    add_to_ollama(home, "registry.ollama.ai/library/broken/latest", "4").write_bytes(b"GGUF\x03")
    studio = home / ".lmstudio" / "models" / "maker"
    (studio / "one").mkdir(parents=True)
    (studio / "two").mkdir()
    for path in ("one/m.gguf", "two/m-Q8_0.gguf", "two/m-F16.gguf"):
        write_gguf(llama, studio / path, "F16" if "F16" in path else "Q8_0")
    write_tiny_qwen3(add_to_hub(home, "org/plain"))
    write_tiny_qwen3(add_to_hub(home, "org/plain", OLDER, ""))
    write_tiny_qwen3(add_to_hub(home, "org/branch", COMMIT, "v1"))
    write_gguf(llama, add_to_hub(home, "org/packed") / "m-q8_0.gguf", "Q8_0")
    write_gguf(llama, add_to_hub(home, "maker/one") / "m.gguf", "Q8_0")
    foreign = write_tiny_qwen3(add_to_hub(home, "org/foreign"))
    config = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (foreign / "config.json").write_text(json.dumps(config))
    (add_to_hub(home, "org/pickled") / "pytorch_model.bin").touch()
    (add_to_hub(home, "org/settings") / "config.json").touch()


def listing(home: Path) -> dict[str, ListedModel]:
    rows = list_models(home, os.environ, ManualClock())
    named = {row.name: row for row in rows}
    assert len(named) == len(rows)
    assert named.pop("guide").runs
    return named


def test_every_model_is_listed_under_a_name_that_leads_to_it(home: Path) -> None:
    fill_stores(home)
    rows = listing(home)
    hidden = str(home / ".cache/huggingface/hub/models--maker--one/snapshots" / COMMIT / "m.gguf")
    good = {
        "tiny:1b": ("Ollama", "Llama", "Q8_0"),
        "hf.co/someone/tiny-GGUF:F32": ("Ollama", "Llama", "F32"),
        "maker/one": ("LM Studio", "Llama", "Q8_0"),
        "maker/two:Q8_0": ("LM Studio", "Llama", "Q8_0"),
        "maker/two:F16": ("LM Studio", "Llama", "F16"),
        "org/plain": ("hub", "Qwen3", "F32"),
        f"org/plain@{OLDER}": ("hub", "Qwen3", "F32"),
        "org/branch@v1": ("hub", "Qwen3", "F32"),
        "org/packed": ("hub", "Llama", "Q8_0"),
        hidden: ("hub", "Llama", "Q8_0"),  # LM Studio's comes first
    }
    assert {name: (row.store, row.family, row.type) for name, row in rows.items() if row.runs} == good
    for name in good:
        row = rows[name]
        assert row.fits and row.num_bytes > 0 and row.memory_bytes
        if row.store != "hub" or name == hidden:
            assert resolve_model(name).name == row.path
    assert {name: row.reason.partition(":")[0] for name, row in rows.items() if not row.runs} == {
        "someone/lost:latest": f"{home}/.ollama/models/blobs/sha256-{'3' * 64} is named by "
        f"{home}/.ollama/models/manifests/registry.ollama.ai/someone/lost/latest, but is not there. "
        "Fetch it again",
        "broken:latest": "incomplete",
        "org/foreign": "a model of the family 'OwnForCausalLM' with its own code (auto_map, trust_remote_code), "
        "which quire never runs. Use a model of one of these",
        "org/pickled": f"{home}/.cache/huggingface/hub/models--org--pickled/snapshots/{COMMIT} has no config.json",
    }


def test_a_model_that_this_user_may_not_read_hides_no_other(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(manifest: Path, store: Path) -> GgufFile:
        if manifest.name == "locked":
            raise PermissionError(13, "Permission denied", str(manifest))
        return model_of_manifest(manifest, store)

    for digit, tag in enumerate(("1b", "locked")):
        add_to_ollama(home, f"registry.ollama.ai/library/tiny/{tag}", str(digit)).touch()
    monkeypatch.setattr(inventory, "model_of_manifest", read)
    found = {model.name: model.problem for model in stored_models(home, {})}
    assert sorted(found) == ["tiny:1b", "tiny:locked"]
    assert (found["tiny:1b"], "Permission denied" in found["tiny:locked"]) == ("", True)


def test_a_store_that_cannot_be_read_is_a_note(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(write_tiny_llama(home / "llama"), add_to_ollama(home, "registry.ollama.ai/library/tiny/1b", "1"), "Q8_0")
    assert main(["models"]) == 0
    assert capsys.readouterr().err == ""
    (home / "service").touch()  # no folder: it cannot be read, even by root
    assert main(["models"]) == 0
    shown = capsys.readouterr()
    assert shown.err == f"note: {home}/service cannot be read (Not a directory); its models are not listed\n"
    assert "\ntiny:1b " in shown.out


@pytest.mark.parametrize("name", ["org/plain", f"org/plain@{OLDER}", "org/branch@v1", "org/packed"])
def test_huggingface_hub_finds_what_is_listed(name: str, home: Path) -> None:
    from huggingface_hub import snapshot_download

    fill_stores(home)
    repository, _, revision = name.partition("@")
    cache = home / ".cache" / "huggingface" / "hub"
    found = snapshot_download(repository, revision=revision or None, cache_dir=cache, local_files_only=True)
    source = next(model.source for model in stored_models(home, {}) if model.name == name)
    assert source is not None and Path(source.name).is_relative_to(found)


def test_a_model_that_does_not_fit_is_told_from_one_that_does_not_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_stores(home)
    monkeypatch.setattr("quire.compute.backend.free_memory", lambda: 1000)
    row = listing(home)["org/plain"]
    assert (row.runs, row.fits) == (True, False)
    assert row.reason.endswith("and KV memory, 1000 B is free")


def test_the_parts_of_a_model_count_together(home: Path) -> None:
    snapshot = add_to_hub(home, "org/split")
    for number in (1, 2, 3):
        (snapshot / f"m-Q8_0-{number:05d}-of-00003.gguf").write_bytes(b"x" * number)
    (model,) = stored_models(home, {})
    assert (model.name, model.num_bytes) == ("org/split", 6)


def test_files_whose_types_are_alike_go_by_their_paths(home: Path) -> None:
    snapshot = add_to_hub(home, "org/alike")
    for name in ("a-Q8_0.gguf", "b-Q8_0.gguf", "c-Q4_K_M.gguf", "d.gguf", "e-BF16.gguf", "f-F16.gguf"):
        (snapshot / name).touch()
    names = [model.name for model in stored_models(home, {})]
    assert names == [
        *(str(snapshot / f"{name}-Q8_0.gguf") for name in "ab"),
        "org/alike:Q4_K_M",
        str(snapshot / "d.gguf"),
        *("org/alike:BF16", "org/alike:F16"),
    ]


# --- stores of strangers ---------------------------------------------------------------------------------------------


def test_of_a_store_only_so_many_names_are_looked_at(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        add_to_ollama(home, f"registry.ollama.ai/library/m{number:02d}/latest", "1")
    add_to_hub(home, "org/plain").joinpath("model.safetensors").touch()
    monkeypatch.setattr(inventory, "MAX_FILES", 50)
    found = list(stored_models(home, {}))
    assert [model.name for model in found if model.store == "hub"] == ["org/plain"]
    assert 10 <= len(found) <= 11
    monkeypatch.setattr(inventory, "MAX_MODELS", 3)
    assert [model.name for model in stored_models(home, {})] == [
        *(found[place].name for place in range(3)),
        "org/plain",
    ]


def test_models_after_the_time_is_up_are_listed_unread(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_stores(home)
    clock = ManualClock()
    described = command._described

    def slowly(*arguments: object) -> ListedModel:
        clock.advance(command.MAX_LOOKING_S / 2)
        return described(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "_described", slowly)
    rows = list_models(home, {}, clock)
    assert [row.name for row in rows if row.type] == ["guide", "hf.co/someone/tiny-GGUF:F32"]
    assert all(row.reason == UNREAD and row.runs is None for row in rows if not row.type and row.path)


def test_what_is_no_file_is_not_waited_for(home: Path) -> None:
    manifest = home / ".ollama/models/manifests/registry.ollama.ai/library/pipe/latest"
    manifest.parent.mkdir(parents=True)
    os.mkfifo(manifest)
    snapshot = add_to_hub(home, "org/pipe", reference="")
    os.mkfifo(snapshot.parents[1] / "refs" / "main")
    os.mkfifo(snapshot / "m-Q8_0.gguf")
    (snapshot / "loop").symlink_to(snapshot)
    rows = listing(home)
    assert rows["pipe:latest"].reason == f"{manifest} is 'a pipe'; allowed: a plain file"
    assert rows[f"org/pipe@{COMMIT}"].reason.endswith("m-Q8_0.gguf is 'a pipe'; allowed: a plain file")


@pytest.mark.parametrize("content", ["", "[", '{"layers": 7}', '{"layers": [{"digest": 7}]}', "[" * 2_000_000])
def test_a_hostile_manifest_is_one_row(content: str, home: Path) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/bad/latest", "1")
    (home / ".ollama/models/manifests/registry.ollama.ai/library/bad/latest").write_text(content)
    write_gguf(write_tiny_llama(home / "llama"), add_to_ollama(home, "registry.ollama.ai/library/good/latest", "2"))
    rows = listing(home)
    assert (rows["bad:latest"].runs, rows["good:latest"].runs) == (False, True)


def test_names_that_a_terminal_would_obey_are_left_out(home: Path) -> None:
    for name in ("a\x1b[2Jb", "..", ".hidden", "a\nb"):
        folder = home / ".lmstudio" / "models" / "maker" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "m.gguf").touch()
    snapshot = add_to_hub(home, "org/odd")
    (snapshot / "a\x1b[2J.gguf").touch()
    assert list(stored_models(home, {})) == []


def test_a_folder_without_a_repository_name_goes_by_its_path(home: Path) -> None:
    folder = write_tiny_qwen3(add_to_hub(home, "gpt2"))
    (model,) = stored_models(home, {})
    assert model.name == str(folder)
    assert resolve_model(model.name) == ModelFolder(folder)
