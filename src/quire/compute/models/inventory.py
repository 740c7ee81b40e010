"""The models on this machine, by the names that `resolve_model` takes, from all stores. Reads names and manifests only.

    guide, smollm2                   quire, and packages that are installed
    NAME:TAG, OWNER/NAME:TAG         Ollama
    OWNER/NAME, OWNER/NAME:TYPE      LM Studio, and the cache of the hub; with @REVISION unless it is main

A store can have thousands of files, and some of them may be hostile: at most `MAX_FILES` names per store are read and
`MAX_MODELS` models are listed. A broken model is listed with its problem, and hides no other model.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Final

from quire.compute.gguf.header import parts_of
from quire.compute.gguf.source import GgufFile
from quire.compute.models.packaged import PACKAGES, find_packaged
from quire.compute.models.snapshots import MAIN, commit_of, hub_cache
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.models.stores import (
    LIBRARY,
    MAX_FILES,
    MODEL_TYPE,
    PART,
    REGISTRY,
    gguf_models,
    lm_studio_stores,
    model_of_manifest,
    ollama_stores,
    types_in,
    why_unreadable,
)
from quire.core.errors import CheckpointError

NAME: Final = re.compile(PART, re.ASCII)
MAX_MODELS: Final = 500
WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth")
HUB, OLLAMA, LM_STUDIO, PACKAGE = "hub", "Ollama", "LM Studio", "package"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk: its name, its store, its bytes there, and its source, or the problem with it."""

    name: str
    store: str
    num_bytes: int
    source: ModelSource | None
    problem: str = ""


def stored_models(home: Path, environ: Mapping[str, str]) -> Iterator[StoredModel]:
    """Yield the models of packages, Ollama, LM Studio and the cache of the hub. Does not mutate.

    If `resolve_model` finds another model first under the same name, a model is listed by its path.
    """
    names: set[str] = set()
    for model in _all(home, environ):
        is_hidden = model.name in names
        yield replace(model, name=model.source.name) if is_hidden and model.source is not None else model
        names.add(model.name)


def _all(home: Path, environ: Mapping[str, str]) -> Iterator[StoredModel]:
    for name in PACKAGES:
        if (path := find_packaged(name)) is not None:
            yield StoredModel(name, PACKAGE, _file_bytes(path), GgufFile(path))
    stores = [*map(_ollama, ollama_stores(home, environ)), *map(_lm_studio, lm_studio_stores(home))]
    for store in (*stores, _hub(hub_cache(home, environ))):
        yield from islice(store, MAX_MODELS)


def unreadable_stores(home: Path, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each store whose models this user cannot see."""
    for store in (*ollama_stores(home, environ), *lm_studio_stores(home), hub_cache(home, environ)):
        if reason := why_unreadable(store):
            yield f"{store} cannot be read ({reason}); its models are not listed"


class _Walk:
    """Lists folders of one store, at most `MAX_FILES` names in total and a fifth of them in one folder. Mutable."""

    def __init__(self) -> None:
        self._num_left = MAX_FILES

    def names(self, folder: Path) -> list[str]:
        """Return the printable names in a folder, sorted; empty if it is not a folder. Mutates."""
        try:
            with os.scandir(folder) as entries:
                names = [entry.name for entry in islice(entries, min(self._num_left, MAX_FILES // 5))]
        except OSError:
            return []
        self._num_left -= len(names)
        return sorted(name for name in names if name.isprintable() and not name.startswith("."))

    def below(self, folder: Path, depth: int) -> Iterator[tuple[str, ...]]:
        """Yield the paths of `depth` names below a folder, if each can be a part of a model's name. Mutates."""
        for name in filter(NAME.fullmatch, self.names(folder)):
            if depth == 1:
                yield (name,)
            else:
                yield from ((name, *rest) for rest in self.below(folder / name, depth - 1))


def _ollama(store: Path) -> Iterator[StoredModel]:
    for host, owner, name, tag in _Walk().below(store / "manifests", 4):
        parts = (host, owner, name) if host != REGISTRY else (name,) if owner == LIBRARY else (owner, name)
        typed = f"{'/'.join(parts)}:{tag}"
        try:
            source = model_of_manifest(store.joinpath("manifests", host, owner, name, tag), store)
        except (CheckpointError, OSError) as error:  # a user may see names in a service's store, and not read its files
            yield StoredModel(typed, OLLAMA, 0, None, str(error))
        else:
            num_bytes = sum(map(_file_bytes, filter(None, (source.path, source.second_file))))
            yield StoredModel(typed, OLLAMA, num_bytes, source)


def _lm_studio(store: Path) -> Iterator[StoredModel]:
    walk = _Walk()
    for owner, name in walk.below(store, 2):
        folder = store / owner / name
        yield from _ggufs(f"{owner}/{name}", "", LM_STUDIO, folder, walk.names(folder))


def _hub(cache: Path) -> Iterator[StoredModel]:
    walk = _Walk()
    for name in walk.names(cache):
        kind, *parts = name.split("--")
        folder = cache / name
        if kind != "models" or not all(map(NAME.fullmatch, parts)):
            continue
        references = {commit_of(folder / "refs" / name): name for name in walk.names(folder / "refs")}
        for commit in walk.names(folder / "snapshots"):
            revision = references.get(commit, commit)
            suffix = "" if revision == MAIN else f"@{revision}"
            snapshot = folder / "snapshots" / commit
            typed = "/".join(parts) if len(parts) == 2 else ""
            yield from _snapshot(typed, suffix, snapshot, walk.names(snapshot))


def _snapshot(name: str, suffix: str, folder: Path, files: list[str]) -> Iterator[StoredModel]:
    """Yield the models in a revision of a repository; none if only its settings were fetched."""
    weights = [file for file in files if file.endswith(WEIGHTS)]
    if weights:
        num_bytes = sum(_file_bytes(folder / file) for file in weights)
        yield StoredModel(f"{name}{suffix}" if name else str(folder), HUB, num_bytes, ModelFolder(folder))
    else:
        yield from _ggufs(name, suffix, HUB, folder, files)


def _ggufs(name: str, suffix: str, store: str, folder: Path, files: list[str]) -> Iterator[StoredModel]:
    """Yield the GGUF models in a folder: one by the folder's name, several by their types if these differ."""
    models, there = gguf_models(files), frozenset(files)
    num_files = Counter(chain.from_iterable(map(types_in, models)))
    for file in models:
        match = MODEL_TYPE.search(file)
        typed = str(folder / file)
        if name and len(models) == 1:
            typed = f"{name}{suffix}"
        elif name and match and num_files[match[0].lower()] == 1:
            typed = f"{name}:{match[0]}{suffix}"
        num_bytes = sum(_file_bytes(folder / part) for part in parts_of(file) if part in there)
        yield StoredModel(typed, store, num_bytes, GgufFile(folder / file))


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
