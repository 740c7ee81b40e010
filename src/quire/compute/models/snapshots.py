"""Finds complete models in the hub's cache, which start without a network.

    models--ORG--NAME/refs/main ──► snapshots/COMMIT: links to blobs, named *.incomplete during a download

The cache does not list the files of a revision. A revision counts as complete if no download is incomplete and all
files for an engine exist: settings, a vocabulary and every weight file that it names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final

from quire.compute.gguf.header import parts_of
from quire.compute.models.config_file import CONFIG_FILE
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.models.stores import MAX_FILES, only_gguf
from quire.compute.weights.checkpoint import INDEX_FILE, SINGLE_FILE, read_weight_map
from quire.core.errors import CheckpointError
from quire.core.model_files import path_of, read_model_file

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
MAX_REFERENCE_BYTES: Final = 100
VOCABULARIES: Final = ("tokenizer.json", "vocab.json", "tokenizer.model")
MAIN: Final = "main"


def hub_cache(home: Path, environ: Mapping[str, str]) -> Path:
    """Return the folder of the cache, whether or not it exists."""
    if path := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return path_of(path)
    shared = Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"
    return path_of(environ.get("HF_HOME") or shared) / "hub"


def commit_of(reference: Path) -> str:
    """Return the commit that a reference of the cache names; empty if it names none."""
    try:
        commit = read_model_file(reference, MAX_REFERENCE_BYTES).decode("ascii", "replace")
    except CheckpointError:
        return ""
    return commit if COMMIT.fullmatch(commit) else ""


def find_complete(repository: str, kind: str, cache: Path) -> ModelSource | None:
    """Return the model of a repository, `kind` of GGUF or its safetensors, if its latest revision is complete here.

    The latest in the cache: the hub's may be newer. None if a file is missing. Reads no weights.
    """
    folder = cache / f"models--{repository.replace('/', '--')}"
    commit = commit_of(folder / "refs" / MAIN)
    snapshot = folder / "snapshots" / commit
    if not commit or not snapshot.is_dir() or _is_half_fetched(folder / "blobs"):
        return None
    if kind:
        file = only_gguf(snapshot, kind)
        return file if file is not None and _has_all(snapshot, parts_of(file.path.name)) else None
    with suppress(CheckpointError):  # the hub may have a valid one
        weights = {SINGLE_FILE}
        if not (snapshot / SINGLE_FILE).is_file():
            weights = {INDEX_FILE, *read_weight_map(snapshot / INDEX_FILE).values()}
        has_words = any((snapshot / name).is_file() for name in VOCABULARIES)
        return ModelFolder(snapshot) if has_words and _has_all(snapshot, [CONFIG_FILE, *weights]) else None
    return None


def _has_all(folder: Path, names: list[str]) -> bool:
    return all((folder / name).is_file() for name in names)


def _is_half_fetched(blobs: Path) -> bool:
    """Return whether a download into a repository was interrupted, or is running."""
    try:
        with os.scandir(blobs) as entries:
            return any(entry.name.endswith(".incomplete") for entry in islice(entries, MAX_FILES))
    except OSError:
        return False
