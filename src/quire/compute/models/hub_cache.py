"""The cache of the hub: the folder in which huggingface_hub keeps downloads. Removes models from it.

Other programs use the cache too. So only huggingface_hub itself removes from it, and only files that lie in it: a link
in it can lead anywhere.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quire.compute.models.hub import HubName
from quire.compute.models.packaged import PACKAGES, find_packaged
from quire.compute.models.snapshots import hub_cache
from quire.compute.models.stores import find_stored, gguf_models, models_of_type, ollama_stores
from quire.core.errors import ModelError
from quire.core.model_files import path_of

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo, CachedRevisionInfo, DeleteCacheStrategy


@dataclass(frozen=True, slots=True)
class Removal:
    """The files of a model in the cache, and huggingface_hub's plan to remove them."""

    repository: str
    folder: Path
    num_files: int
    num_bytes: int
    strategy: DeleteCacheStrategy

    def execute(self) -> None:
        """Remove the files."""
        self.strategy.execute()


def find_removal(name: str, home: Path, environ: Mapping[str, str]) -> Removal:
    """Return the removal of a model; raises `ModelError` if it is not in the cache. Removes nothing yet."""
    model, cache = HubName.parse(name), hub_cache(home, environ)
    if model is None or not cache.is_dir():
        raise _elsewhere(name, home, environ)
    from huggingface_hub import scan_cache_dir

    for path in cache.glob("*/refs/**/*"):
        if not path.is_dir() and not path.is_file():  # a pipe or a device, which the library would read without end
            raise ModelError(name, f"{path} is not a regular file. Remove it. Nothing was removed")
    try:
        info = scan_cache_dir(cache)
    except Exception as error:  # the library raises at some broken links
        raise ModelError(name, f"The hub's cache, {cache}, cannot be read ({error}). Nothing was removed") from error
    for repository in info.repos:
        if repository.repo_type == "model" and repository.repo_id == model.repository:
            revisions = _revisions(repository, model)
            # A copy of a repository has the same commits, and the library would take the first one that it meets.
            alone = replace(info, repos=frozenset({repository}))
            strategy = alone.delete_revisions(*(revision.commit_hash for revision in revisions))
            _require_inside(strategy, cache.resolve(), name)
            num_files = sum(revision.nb_files for revision in revisions)
            size = strategy.expected_freed_size
            return Removal(model.repository, repository.repo_path, num_files, size, strategy)
    raise _elsewhere(name, home, environ)


def _revisions(repository: CachedRepoInfo, model: HubName) -> list[CachedRevisionInfo]:
    """Return the revisions that a name means; raises if it names one file of several."""
    wanted = model.revision
    found = [each for each in repository.revisions if not wanted or wanted in (each.commit_hash, *each.refs)]
    if not found:
        raise ModelError(str(model), f"The hub's cache has {model.repository}, but no revision {wanted}")
    files = sorted({file.file_name for revision in found for file in revision.files})
    others = [file for file in files if model.kind.lower() not in file.lower()]
    others += sorted({*gguf_models(files)} - {*models_of_type(files, model.kind)})
    if others:
        advice = f"Name the repository to remove all its files: quire models rm {model.repository}"
        raise ModelError(str(model), f"{model.repository} has more than {model.kind}, such as {others[0]}. {advice}")
    return found


def _require_inside(strategy: DeleteCacheStrategy, cache: Path, name: str) -> None:
    """Raise unless every file to be removed lies in the cache."""
    for path in (*strategy.repos, *strategy.snapshots, *strategy.refs, *strategy.blobs):
        if not Path(os.path.realpath(path)).is_relative_to(cache):
            raise ModelError(name, f"{path} is outside the hub's cache, {cache}. Nothing was removed")


def _elsewhere(name: str, home: Path, environ: Mapping[str, str]) -> ModelError:
    """Return the error for a model that is not in the cache; it names the program that has it."""
    if path_of(name).exists():
        return ModelError(name, f"{name} is a path. quire removes only models in the hub's cache")
    if find_packaged(name) is not None:
        return ModelError(name, f"{name} belongs to a package: pip uninstall {PACKAGES[name]}")
    stored = find_stored(name, home, environ)
    if stored is None:
        return ModelError(name, f"{name} is not in the hub's cache. To list the models on this machine: quire models")
    if any(map(stored.path.is_relative_to, ollama_stores(home, environ))):
        return ModelError(name, f"{name} is in Ollama's store, where quire writes nothing: ollama rm {name}")
    return ModelError(name, f"{name} is in LM Studio's store, where quire writes nothing. Delete it in LM Studio")
