"""Stores of other programs, made in a folder that stands for a home."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from quire.compute.models.stores import MODEL_LAYER, PARAMS_LAYER

COMMIT, OLDER = "a" * 40, "b" * 40
VARIABLES = ("OLLAMA_MODELS", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
"""Names in the environment that say where stores are."""


def add_to_ollama(home: Path, path: str, digit: str, params: dict[str, object] | None = None) -> Path:
    """Add a manifest to Ollama's store, with parameters, and return where its blob goes."""
    store = home / ".ollama" / "models"
    manifest = store / "manifests" / path
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [{"mediaType": MODEL_LAYER, "digest": f"sha256:{digit * 64}"}]
    (store / "blobs").mkdir(exist_ok=True)
    if params is not None:
        layers.append({"mediaType": PARAMS_LAYER, "digest": f"sha256:{'5' * 64}"})
        (store / "blobs" / f"sha256-{'5' * 64}").write_text(json.dumps(params))
    manifest.write_text(json.dumps({"layers": layers}))
    return store / "blobs" / f"sha256-{digit * 64}"


def add_to_hub(home: Path, repository: str, commit: str = COMMIT, reference: str = "main") -> Path:
    """Add a revision to the cache of the hub, and return its folder."""
    folder = home / ".cache" / "huggingface" / "hub" / f"models--{repository.replace('/', '--')}"
    for name in ("blobs", "refs", f"snapshots/{commit}"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    if reference:
        (folder / "refs" / reference).write_text(commit)
    return folder / "snapshots" / commit


def add_file(snapshot: Path, name: str, content: bytes) -> Path:
    """Add a file to a revision as the hub's library does: a link to a blob, which is returned."""
    blob = snapshot.parents[1] / "blobs" / hashlib.sha1(content).hexdigest()
    blob.write_bytes(content)
    (snapshot / name).symlink_to(blob)
    return blob
