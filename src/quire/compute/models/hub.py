"""From a user's name for a model to its source.

    a path ──► what other programs store ──► the cache of the hub ──► the hub

An existing model is used as it is, without a network. Only a name of the form ORGANISATION/NAME is looked up, through
`huggingface_hub` if that is installed, with its own cache and credentials. Only settings, tokenizer and safetensors are
fetched, never code or pickles. ORGANISATION/NAME:TYPE fetches the GGUF file with that type in its name, such as Q4_K_M.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from quire.compute.gguf.source import GgufFile, is_gguf
from quire.compute.models.refusals import missing_folder
from quire.compute.models.source import ModelFolder, ModelSource
from quire.compute.models.stores import find_stored, only_gguf
from quire.compute.weights.checkpoint import INDEX_FILE, SINGLE_FILE
from quire.core.errors import ModelError
from quire.core.model_files import is_there

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WANTED: Final = ("*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model")
SETTINGS: Final = ("config.json", "generation_config.json")
UNWANTED: Final = ("*/*", "consolidated*")
ADVICE: Final = "Give a model folder, or fetch the model on a machine with network access: hf download {name}"


def resolve_model(name: str) -> ModelSource:
    """Return where a model is; may download it if `name` is neither a path nor in a store."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        return _in_folder(path)
    if is_gguf(path) and path.exists():
        return GgufFile(path)
    stored = None if path.exists() else find_stored(name, Path.home(), os.environ)
    if stored is not None:
        return stored
    repository, _, kind = name.partition(":")
    if path.exists() or is_gguf(path) or HUB_ID.fullmatch(repository) is None:
        raise missing_folder(name)
    if not kind:
        return _in_folder(_download(name, WANTED))
    folder = _download(repository, (f"*{kind}*.gguf",))
    file = only_gguf(folder, kind)
    if file is None:
        raise ModelError(name, f"{repository} has no GGUF file with {kind} in its name")
    return file


def place_notices(name: str, source: ModelSource) -> tuple[str, ...]:
    """Return where a model was found whose name, such as owner/name or name:tag, is no path."""
    is_path = ("/" not in name and ":" not in name) or Path(name).expanduser().exists()
    return () if is_path else (f"{name} is {source.name}",)


def _in_folder(folder: Path) -> ModelSource:
    """Return the model in a folder: its GGUF file where it has no safetensors."""
    if any(is_there(folder / name) for name in (SINGLE_FILE, INDEX_FILE)):
        return ModelFolder(folder)
    return only_gguf(folder) or ModelFolder(folder)


def resolve_settings(name: str) -> ModelSource:
    """Return where a model is as `resolve_model` does; fetches only settings, no weights, for a hub id."""
    known = Path(name).expanduser().exists() or find_stored(name, Path.home(), os.environ) is not None
    if known or HUB_ID.fullmatch(name) is None:
        return resolve_model(name)
    return ModelFolder(_download(name, SETTINGS))


def _download(name: str, wanted: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        reason = "is a hub id, but huggingface_hub is not installed"
        raise ModelError(name, f"{name} {reason}. {ADVICE.format(name=name)}") from error
    try:
        folder = snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=list(UNWANTED))
    # The library raises its own errors, those of its HTTP client and those of the system; all mean the same here.
    except Exception as error:
        reason = f"is not in the local cache, and the hub cannot be reached ({type(error).__name__})"
        raise ModelError(name, f"{name} {reason}. {ADVICE.format(name=name)}") from error
    return Path(folder)
