"""From a user's name for a model to its source.

    a path ──► an installed package ──► stores of other programs ──► the cache of the hub ──► the hub

A model on this machine, or complete in the hub's cache, is used unchanged and without a network; `quire models pull`
looks for a newer version on the hub. Other names of the form ORGANISATION/NAME are looked up through `huggingface_hub`
if it is installed, with its own cache and credentials. Only settings, tokenizer and weights are fetched, never code or
pickles; an interrupted download of weights resumes. A GGUF model gets the image encoder next to it (image_encoders.py).

    ORGANISATION/NAME              the safetensors
    ORGANISATION/NAME:TYPE         the GGUF file of that type by its name, such as Q4_K_M
    …@REVISION                     at a branch, a tag or a commit
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import is_gguf, parts_of
from quire.compute.gguf.source import GgufFile
from quire.compute.models.hub_blobs import fetch_blobs, file_names
from quire.compute.models.image_encoders import chosen, with_images
from quire.compute.models.inventory import stored_models
from quire.compute.models.packaged import PACKAGES, find_packaged
from quire.compute.models.refusals import missing_folder
from quire.compute.models.snapshots import find_complete, hub_cache
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.models.stores import (
    MAX_NAMED,
    PART,
    find_stored,
    models_of_type,
    ollama_stores,
    only_gguf,
    why_unreadable,
)
from quire.compute.weights.checkpoint import INDEX_FILE, SINGLE_FILE
from quire.core.config import AUTO
from quire.core.errors import ModelError
from quire.core.model_files import is_there, path_of

GUIDE: Final = "guide"
"""The built-in model, which the engine locates."""

HUB_NAME: Final = re.compile(
    rf"(?P<repository>{PART}/{PART})(:(?P<kind>{PART}))?(@(?P<revision>{PART}(/{PART}){{0,3}}))?", re.ASCII
)
WANTED: Final = ("*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model")
SETTINGS: Final = ("config.json", "generation_config.json")
UNWANTED: Final = ("[!0-9]*/*", "consolidated*")
"""Folders with a number are the steps after the model, such as `1_Pooling`; others have it in other formats."""
SHOWS_IMAGES: Final = re.compile("[\"']image(_url)?[\"']")
"""In a chat template: it writes the images of a content."""

ADVICE: Final = (
    "Give a model folder or a name that quire models lists, or fetch it on a machine with network access: {command}"
)
REFUSALS: Final = MappingProxyType(
    {
        "GatedRepoError": "is gated. Request access at https://huggingface.co/{repository}, then: hf auth login",
        "RepositoryNotFoundError": "does not exist on the hub, or is private. Check the name, or log in: hf auth login",
        "RevisionNotFoundError": "has no such revision. Name a branch, a tag or a full commit id",
    }
)
"""The name of a huggingface_hub error → the rest of a sentence about the model."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the hub. `kind`: the type of a GGUF file, empty for safetensors. `revision`: empty for the latest."""

    repository: str
    kind: str = ""
    revision: str = ""

    @classmethod
    def parse(cls, name: str) -> HubName | None:
        """Return the parts of a name; None if the name is not a hub name.

        >>> HubName.parse("Qwen/Qwen3-0.6B-GGUF:Q8_0@main")
        HubName(repository='Qwen/Qwen3-0.6B-GGUF', kind='Q8_0', revision='main')
        """
        match = HUB_NAME.fullmatch(name)
        return None if match is None else cls(match["repository"], match["kind"] or "", match["revision"] or "")

    def __str__(self) -> str:
        kind, revision = self.kind and f":{self.kind}", self.revision and f"@{self.revision}"
        return f"{self.repository}{kind}{revision}"


def resolve_model(name: str, images: str = AUTO) -> ModelSource:
    """Return the source of a model; downloads it if `name` is neither a path nor in a store.

    `images`: the image encoder of a GGUF model, as `EngineConfig.mmproj` names it.
    """
    return with_images(_resolved(name, fetches_images=images == AUTO), images)


def _resolved(name: str, *, fetches_images: bool) -> ModelSource:
    path = path_of(name)
    if name and path.is_dir():
        return _in_folder(path)
    if is_gguf(path) and path.exists():
        return GgufFile(path)
    kept = None if path.exists() else find_kept(name)
    if kept is not None:
        return kept
    model = HubName.parse(name)
    if path.exists() or is_gguf(path) or model is None:
        home, environ = Path.home(), os.environ
        stored = [GUIDE, *(each.name for each in stored_models(home, environ))]
        raise missing_folder(name, stored, list(map(_with_problem, ollama_stores(home, environ))))
    return _cached(model) or fetch_model(model, images=fetches_images)


def _with_problem(store: Path) -> str:
    reason = why_unreadable(store)
    return f"{store} (cannot be read: {reason})" if reason else str(store)


def resolve_settings(name: str, images: str = AUTO) -> ModelSource:
    """Return the source of a model like `resolve_model`, but do not download the weights of safetensors."""
    model = HubName.parse(name)
    if model is None or model.kind or path_of(name).exists() or find_kept(name) is not None:
        return resolve_model(name, images)
    return _cached(model) or fetch_settings(model)


def _cached(model: HubName) -> ModelSource | None:
    """Return a model that is complete in the hub's cache, unless the name has a revision."""
    cache = hub_cache(Path.home(), os.environ)
    return None if model.revision else find_complete(model.repository, model.kind, cache)


def find_kept(name: str) -> GgufFile | None:
    """Return the model that a package or another program stores here under a name, or None."""
    packaged = find_packaged(name)
    return find_stored(name, Path.home(), os.environ) if packaged is None else GgufFile(packaged)


def place_notices(name: str, source: ModelSource, *, images: bool = True) -> tuple[str, ...]:
    """Return the location of a model whose name is not a path, and that of the image encoder in a file of its own.

    `images`: whether to say how to fetch an image encoder that a model of the hub lacks here.
    """
    is_path = ("/" not in name and ":" not in name and name not in PACKAGES) or path_of(name).exists()
    place = () if is_path else (f"{name} is {source.name}",)
    if not isinstance(source, GgufFile):
        return place
    if source.second_file:
        return (*place, f"image encoder: {source.second_file}")
    if images and source.image_encoder is None and not source.notices and _lacks_encoder(name, source):
        return (*place, f"text only: the image encoder is not here. If the hub has it: quire models pull {name}")
    return place + source.notices


def _lacks_encoder(name: str, source: GgufFile) -> bool:
    """Return whether a model of the hub was made for images, by its chat template."""
    model = HubName.parse(name)
    if model is None or not model.kind or path_of(name).exists():
        return False
    template = source.json_object("tokenizer_config.json").get("chat_template")
    return SHOWS_IMAGES.search(str(template)) is not None


def fetch_model(model: HubName, *, images: bool = True) -> ModelSource:
    """Return a model of the hub; downloads the files that the hub's cache on this machine lacks.

    `images`: whether to fetch the image encoder of a GGUF model too.
    """
    if not model.kind:
        source = _in_folder(_download(model, WANTED))
        if not source.has("config.json"):
            sentence = (
                f"{model} has no config.json. If it has GGUF files, name the type of one: {model.repository}:Q4_K_M"
            )
            raise ModelError(str(model), sentence)
        return source
    file = only_gguf(_download(model, _wanted_files(model, images=images)), model.kind)
    if file is None:
        raise ModelError(str(model), f"{model.repository} has no GGUF file with {model.kind} in its name")
    return file


def _wanted_files(model: HubName, *, images: bool) -> tuple[str, ...]:
    """Return the patterns of the files of a GGUF model: their names, if the hub lists them.

    `images`: whether to add the image encoder for it, if there is one. Raises `ModelError` if several files fit.
    """
    names = [name for name in file_names(model.repository, model.revision) if "/" not in name]
    found = models_of_type(names, model.kind)
    if not found:
        return tuple(f"*{kind}*.gguf" for kind in dict.fromkeys((model.kind, model.kind.upper(), model.kind.lower())))
    if len(found) > 1:
        some = f"several files for {model.kind}: {', '.join(found[:MAX_NAMED])}"
        raise ModelError(str(model), f"{model.repository} has {some}. Give more of the name of one instead")
    return *map(escape, parts_of(found[0])), *map(escape, chosen(found[0], names)[:1] if images else ())


def fetch_settings(model: HubName) -> ModelFolder:
    """Return the settings of a model of the hub, without its weights; downloads them if the cache lacks them."""
    return ModelFolder(_download(model, SETTINGS))


def _in_folder(folder: Path) -> ModelSource:
    """Return the model in a folder: its safetensors, else its GGUF file."""
    if any(is_there(folder / name) for name in (SINGLE_FILE, INDEX_FILE)):
        return ModelFolder(folder)
    return only_gguf(folder) or ModelFolder(folder)


def _download(model: HubName, wanted: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        sentence = f"{model} is a hub id, but huggingface_hub is not installed: pip install huggingface_hub"
        raise ModelError(str(model), sentence) from error
    try:
        if wanted != SETTINGS:
            fetch_blobs(model.repository, model.revision, wanted, UNWANTED)
        found = snapshot_download(
            model.repository,
            revision=model.revision or None,
            allow_patterns=list(wanted),
            ignore_patterns=list(UNWANTED),
        )
    except ModelError:
        raise
    # The library raises its own errors, those of its HTTP client and those of the system.
    except Exception as error:
        raise ModelError(str(model), _refusal(model, type(error).__name__)) from error
    folder = Path(found)
    if not folder.is_dir():
        raise ModelError(str(model), f"{model.repository} has none of the files {', '.join(wanted)}")
    return folder


def _refusal(model: HubName, error: str) -> str:
    """Return the message for a failed download: the reason, and the step that helps."""
    if error in REFUSALS:
        return f"{model} {REFUSALS[error].format(repository=model.repository)}"
    include = f' --include "*{model.kind}*.gguf"' if model.kind else ""
    command = f"hf download {model.repository}{include}{model.revision and f' --revision {model.revision}'}"
    reason = f"is not in the local cache, and the hub cannot be reached ({error})"
    return f"{model} {reason}. {ADVICE.format(command=command)}"
