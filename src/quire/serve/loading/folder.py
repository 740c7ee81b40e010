"""The models in a folder: model folders and GGUF files.

    models/
      qwen3/        config.json, *.safetensors   a model, called qwen3
      phi-4.gguf                                 a model, called phi-4.gguf
      notes/                                     skipped: no config.json and no GGUF file

It is the operator's own folder, so links are followed. Skipped entries are listed, with the reason.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from quire.core.errors import InvalidConfigError
from quire.core.model_files import path_of

MAX_ENTRIES: Final = 1000
LATER_PART: Final = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf\Z", re.IGNORECASE)
GGUF: Final = ".gguf"


@dataclass(frozen=True, slots=True)
class ModelsInFolder:
    """The sorted paths of models, and the skipped entries with their reasons."""

    paths: tuple[str, ...]
    skipped: tuple[str, ...]


def models_in(folder: str) -> ModelsInFolder:
    """Return the models in a folder; raises `InvalidConfigError` if the folder cannot be read or has no model."""
    top = path_of(folder)
    try:
        with os.scandir(top) as entries:
            names = sorted(entry.name for entry in islice(entries, MAX_ENTRIES + 1))
    except OSError as error:
        raise InvalidConfigError("model_dir", folder, f"a folder that can be read ({error.strerror})") from None
    if len(names) > MAX_ENTRIES:
        raise InvalidConfigError("model_dir", folder, f"a folder of at most {MAX_ENTRIES} entries")
    paths, skipped = [], []
    for name in names:
        if name.startswith("."):
            continue
        reason = _why_not(top / name)
        if reason:
            skipped.append(f"{(top / name)!s}: {reason}")
        else:
            paths.append(str((top / name).absolute()))
    if not paths:
        raise InvalidConfigError("model_dir", folder, "a folder with model folders or GGUF files in it")
    return ModelsInFolder(tuple(paths), tuple(skipped))


def _why_not(path: Path) -> str:
    """Return why a path is not a model; an empty text if it can be one."""
    if not path.name.isprintable():
        return "its name cannot be printed"
    try:
        if path.is_dir():
            has_model = (path / "config.json").exists() or any(path.glob(f"*{GGUF}"))
            return "" if has_model else "no config.json and no GGUF file in it"
        if path.suffix.lower() != GGUF or not path.is_file():
            return "neither a folder nor a GGUF file"
    except OSError as error:
        return error.strerror or "cannot be read"
    if LATER_PART.search(path.name):
        return "a later part of a model in several files"
    return "the image encoder of a model, not a model" if "mmproj" in path.name.lower() else ""
