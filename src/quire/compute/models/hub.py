"""From what a user calls a model to a folder: a path, or the id of a repository on the hub.

A folder that is there is taken as it is, so that a machine without a network needs nothing. Only
a name of the form ORGANISATION/NAME is looked up, through `huggingface_hub` where that is
installed, with its own cache and its own credentials; and of the repository only settings,
tokenizer and safetensors are fetched, never code or pickles.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from quire.core.errors import CheckpointError

HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WANTED: Final = ("*.json", "*.jinja", "*.safetensors", "*.txt", "tokenizer.model")
SETTINGS: Final = ("config.json", "generation_config.json")
UNWANTED: Final = ("*/*", "consolidated*")
ADVICE: Final = "the path of a model folder; fetch it where there is a network with `hf download {name}`"


def resolve_model(name: str) -> Path:
    """Return the folder of a model; may download it, where `name` is no folder but a hub id."""
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return folder
    if folder.is_file():
        raise CheckpointError(f"model {name}", "a file", "a folder with config.json and safetensors in it")
    if HUB_ID.fullmatch(name) is None:
        raise CheckpointError(f"model {name}", "not there", "a folder that is there, or a hub id: ORGANISATION/NAME")
    return _download(name, WANTED)


def resolve_settings(name: str) -> Path:
    """Return the folder of a model as `resolve_model` does; of a hub id only the settings are fetched, no weights."""
    if HUB_ID.fullmatch(name) is None or Path(name).expanduser().exists():
        return resolve_model(name)
    return _download(name, SETTINGS)


def _download(name: str, wanted: tuple[str, ...]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        found = "a hub id, and huggingface_hub is not installed"
        raise CheckpointError(f"model {name}", found, ADVICE.format(name=name)) from error
    try:
        folder = snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=list(UNWANTED))
    # The library raises errors of its own, of its HTTP client and of the system; all mean one thing.
    except Exception as error:
        found = f"a hub id that could not be fetched ({type(error).__name__})"
        raise CheckpointError(f"model {name}", found, ADVICE.format(name=name)) from error
    return Path(folder)
