"""Finds the source of a model from a user's name for it: a path, or a repository id on the hub.

An existing folder is used as it is, without a network. Only a name of the form ORGANISATION/NAME is looked
up, through `huggingface_hub` if that is installed, with its own cache and credentials. Only settings,
tokenizer and safetensors are fetched, never code or pickles.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from quire.compute.models.refusals import gguf_refusal, missing_folder
from quire.compute.models.source import ModelFolder
from quire.core.errors import ModelError

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WANTED: Final = ("*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model")
SETTINGS: Final = ("config.json", "generation_config.json")
UNWANTED: Final = ("*/*", "consolidated*")
ADVICE: Final = "Give a model folder, or fetch the model on a machine with network access: hf download {name}"


def resolve_model(name: str) -> ModelFolder:
    """Return the folder of a model; may download it if `name` is no folder but a hub id."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return ModelFolder(folder)
    if folder.suffix.lower() == ".gguf" and folder.exists():
        raise gguf_refusal(folder)
    if folder.exists() or HUB_ID.fullmatch(name) is None:
        raise missing_folder(name)
    return _download(name, WANTED)


def resolve_settings(name: str) -> ModelFolder:
    """Return the folder of a model as `resolve_model` does; fetches only settings, no weights, for a hub id."""
    if HUB_ID.fullmatch(name) is None or Path(name).expanduser().exists():
        return resolve_model(name)
    return _download(name, SETTINGS)


def _download(name: str, wanted: tuple[str, ...]) -> ModelFolder:
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
    return ModelFolder(Path(folder))
