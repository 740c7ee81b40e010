"""Models of other programs are found by the names that people know, and only where they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.compute.gguf.source import GgufFile
from quire.compute.models.hub import resolve_model
from quire.compute.models.stores import MODEL_LAYER, find_stored
from quire.core.errors import CheckpointError, ModelError

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
