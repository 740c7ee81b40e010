"""`quire models`, `quire models pull` and `quire models rm`: what they print, fetch and remove."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from quire import cli
from quire.compute.models.hub import SETTINGS, WANTED
from support.gguf_models import write_gguf
from support.image_models import write_image_model
from support.model_stores import COMMIT, OLDER, VARIABLES, add_file, add_to_hub, add_to_ollama
from support.quantized_models import write_quantized
from support.tiny_checkpoint import write_tiny_llama, write_tiny_qwen3


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    return tmp_path


class Command:
    """Runs `quire models` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        status = cli.main(("models", *arguments))
        return status, *self._capsys.readouterr()


@pytest.fixture
def models(home: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())


# --- the list ----------------------------------------------------------------------------------


def test_the_list_says_what_runs_here(models: Command, home: Path) -> None:
    write_gguf(write_tiny_llama(home / "llama"), add_to_ollama(home, "registry.ollama.ai/library/tiny/1b", "1"), "Q8_0")
    add_to_ollama(home, "registry.ollama.ai/library/broken/latest", "4").write_bytes(b"GGUF\x03")
    status, out, err = models()
    assert (status, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert out.splitlines()[0].split() == ["NAME", "FAMILY", "SIZE", "TYPE", "STORE", "RUNS", "HERE"]
    assert rows["guide"].split()[1:] == ["Qwen3", "5.3", "MiB", "BF16", "quire", "yes"]
    assert rows["tiny:1b"].split()[-3:] == ["Q8_0", "Ollama", "yes"]
    assert "no: incomplete: it has 5 bytes and needs at least 8" in rows["broken:latest"]


def test_the_type_of_a_quantised_folder_is_its_method(models: Command, home: Path) -> None:
    made, snapshot = write_quantized(home / "awq", "awq"), add_to_hub(home, "org/quantised")
    for name in ("config.json", "model.safetensors"):
        add_file(snapshot, name, (made / name).read_bytes())
    status, out, _ = models()
    (row,) = (line.split() for line in out.splitlines() if line.startswith("org/quantised"))
    assert (status, row[-3:]) == (0, ["AWQ", "hub", "yes"])


def test_the_list_says_which_models_read_images(models: Command, home: Path) -> None:
    made, snapshot = write_image_model(home / "made"), add_to_hub(home, "org/eye")
    for path in made.iterdir():
        add_file(snapshot, path.name, path.read_bytes())
    status, out, _ = models()
    (row,) = (line for line in out.splitlines() if line.startswith("org/eye"))
    assert (status, row.endswith("yes, reads images")) == (0, True)


def test_the_list_as_json_has_a_line_for_each_model(models: Command, home: Path) -> None:
    add_to_ollama(home, "registry.ollama.ai/library/broken/latest", "4").write_bytes(b"GGUF\x03")
    status, out, err = models("--json")
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert (status, err) == (0, "")
    assert rows["guide"] | {"path": ""} == {
        **{"name": "guide", "store": "quire", "path": "", "num_bytes": 5518048, "family": "Qwen3", "type": "BF16"},
        **{"memory_bytes": rows["guide"]["memory_bytes"], "runs": True, "fits": True, "reason": ""},
    }
    assert (rows["broken:latest"]["runs"], rows["broken:latest"]["memory_bytes"]) == (False, None)


# --- pull ----------------------------------------------------------------------------------------


class FakeHub:
    """Stands in for huggingface_hub: a repository is a function that writes what it is asked for into the cache."""

    def __init__(self, home: Path) -> None:
        self.folder = add_to_hub(home, "org/m")
        self.asked: list[tuple[str, str | None, tuple[str, ...]]] = []

    def model_info(self, *_: object, **__: object) -> object:
        raise ConnectionError("no list of files")

    def snapshot_download(
        self, name: str, *, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]
    ) -> str:
        self.asked.append((name, revision, tuple(allow_patterns)))
        return str(self.folder)


def test_a_pull_reads_the_settings_before_it_fetches_the_weights(
    models: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(home)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    write_tiny_qwen3(hub.folder)
    status, out, err = models("pull", "org/m@v2")
    assert (status, out, err) == (0, f"org/m@v2 is in {hub.folder}\nTo talk to it: quire chat org/m@v2\n", "")
    assert hub.asked == [("org/m", "v2", SETTINGS), ("org/m", "v2", WANTED)]
    config = {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}}
    (hub.folder / "config.json").write_text(json.dumps(config))
    status, out, err = models("pull", "org/m")
    assert (status, out) == (2, "")
    assert "with its own code (auto_map, trust_remote_code), which quire never runs. Use a model of one of" in err
    assert hub.asked[2:] == [("org/m", None, SETTINGS)]


def test_code_beside_a_family_that_quire_knows_is_not_run_and_not_missed(
    models: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(home)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    write_tiny_qwen3(hub.folder, settings={"auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}})
    (hub.folder / "modeling_own.py").write_text("raise SystemExit('run')")
    assert models("pull", "org/m")[0] == 0


def test_a_pull_of_a_gguf_file_and_of_what_is_here_already(
    models: Command, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = FakeHub(home)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)  # type: ignore[arg-type]
    file = write_gguf(write_tiny_llama(home / "llama"), hub.folder / "m-q8_0.gguf", "Q8_0")
    status, out, _ = models("pull", "org/m:Q8_0")
    assert (status, out.splitlines()[0]) == (0, f"org/m:Q8_0 is in {file}")
    assert hub.asked == [("org/m", None, ("*Q8_0*.gguf", "*q8_0*.gguf"))]
    status, out, _ = models("pull", str(file))
    assert (status, out.splitlines()[0], len(hub.asked)) == (0, f"{file} is in {file}", 1)
    file.write_bytes(file.read_bytes()[:-1])
    status, _, err = models("pull", "org/m:Q8_0")
    assert status == 2 and "m-q8_0.gguf is incomplete" in err and "160,928. Download it again." in err


@pytest.mark.parametrize("name", ["qwen3:0.6b", "no-such-model"])
def test_a_pull_of_what_is_no_name_of_the_hub(name: str, models: Command) -> None:
    status, out, err = models("pull", name)
    assert (status, out) == (2, "")
    assert err.startswith(f'quire: error: "{name}" is no model of the Hugging Face hub. quire pulls ORG/REPO, such as')


# --- rm --------------------------------------------------------------------------------------------


def fill(home: Path) -> tuple[Path, Path]:
    """Put two revisions that share a file into the cache, and another repository."""
    new, old = add_to_hub(home, "org/m"), add_to_hub(home, "org/m", OLDER, "v1")
    for snapshot in (new, old):
        add_file(snapshot, "config.json", b"shared")
    add_file(new, "m-Q8_0.gguf", b"the new one")
    add_file(old, "m-Q8_0.gguf", b"that of old")
    add_file(add_to_hub(home, "org/other"), "config.json", b"other")
    return new, old


def test_a_model_is_removed_by_its_library(models: Command, home: Path) -> None:
    new, _ = fill(home)
    cache = new.parents[2]
    status, out, err = models("rm", "org/m", "--yes")
    assert (status, err) == (0, "")
    assert out == f"4 files of org/m, 28 B, in {cache}/models--org--m\nRemoved.\n"
    assert [path for path in files_in(cache) if "org--m" in path] == []
    assert (cache / "models--org--other" / "snapshots" / COMMIT / "config.json").read_bytes() == b"other"


@pytest.mark.parametrize("revision", ["v1", OLDER])
def test_a_revision_is_removed_without_what_another_shares(revision: str, models: Command, home: Path) -> None:
    new, old = fill(home)
    status, _, err = models("rm", f"org/m@{revision}", "-y")
    assert (status, err) == (0, "")
    assert not old.exists() and files_in(new) == ["config.json", "m-Q8_0.gguf"]
    assert (new / "config.json").read_bytes() == b"shared"


def test_a_cache_that_its_library_cannot_read_is_one_line(models: Command, home: Path) -> None:
    new, _ = fill(home)
    (new.parent / ("d" * 40)).symlink_to("nothing")
    status, out, err = models("rm", "org/m", "--yes")
    assert (status, out) == (2, "")
    assert err.startswith("quire: error: The hub's cache, ") and err.endswith("Nothing was removed\n")
    assert err.count("\n") == 1 and new.exists()


def test_a_reference_that_never_ends_is_not_read(models: Command, home: Path) -> None:
    new, _ = fill(home)
    link = new.parents[1] / "refs" / "zeros"
    link.symlink_to("/dev/zero")
    status, out, err = models("rm", "org/m", "--yes")
    assert (status, out) == (2, "")
    assert err == f"quire: error: {link} is not a regular file. Remove it. Nothing was removed\n"
    assert new.exists()


def test_nothing_is_removed_unasked(models: Command, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new, _ = fill(home)
    before = files_in(home)
    status, _, err = models("rm", "org/m")
    assert (status, err) == (2, "quire: error: Nothing was removed: no terminal to ask on. Give --yes\n")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert models("rm", "org/m")[0] == 1
    assert files_in(home) == before
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert models("rm", "org/m")[0] == 0
    assert not new.exists()


def test_a_file_is_not_removed_with_its_neighbours(models: Command, home: Path) -> None:
    new, _ = fill(home)
    status, _, err = models("rm", "org/m:Q8_0", "--yes")
    advice = "Name the repository to remove all its files: quire models rm org/m"
    assert (status, err) == (2, f"quire: error: org/m has more than Q8_0, such as config.json. {advice}\n")
    for snapshot in (new, new.with_name(OLDER)):
        (snapshot / "config.json").unlink()
    add_file(new, "m-Q8_0_L.gguf", b"of another type")
    _, _, err = models("rm", "org/m:Q8_0", "--yes")
    assert err == f"quire: error: org/m has more than Q8_0, such as m-Q8_0_L.gguf. {advice}\n"
    (new / "m-Q8_0_L.gguf").unlink()
    assert models("rm", "org/m:q8_0", "--yes")[0] == 0


def test_links_out_of_the_cache_lead_nowhere(models: Command, home: Path) -> None:
    _, old = fill(home)
    precious = home / "precious"
    precious.write_text("mine")
    (old / "link").symlink_to(precious)
    status, _, err = models("rm", "org/m@v1", "--yes")
    assert status == 2 and f"{precious} is outside the hub's cache, " in err
    assert old.exists()
    assert models("rm", "org/m", "--yes")[0] == 0  # the whole repository: the link is removed, not followed
    assert precious.read_text() == "mine"


def test_what_others_keep_is_left_to_them(models: Command, home: Path) -> None:
    blob = add_to_ollama(home, "registry.ollama.ai/library/tiny/1b", "1")
    blob.touch()
    studio = home / ".lmstudio" / "models" / "maker" / "one"
    studio.mkdir(parents=True)
    (studio / "m.gguf").touch()
    fill(home)
    before = files_in(home)
    for name, expected in {
        "tiny:1b": "tiny:1b is in Ollama's store, where quire writes nothing: ollama rm tiny:1b",
        "maker/one": "maker/one is in LM Studio's store, where quire writes nothing. Delete it in LM Studio",
        "org/none": "org/none is not in the hub's cache. To list the models on this machine: quire models",
        "guide": "guide is not in the hub's cache. To list the models on this machine: quire models",
        "org/m@v9": "The hub's cache has org/m, but no revision v9",
        str(blob): f"{blob} is a path. quire removes only models in the hub's cache",
    }.items():
        assert models("rm", name, "--yes") == (2, "", f"quire: error: {expected}\n")
    assert files_in(home) == before
