"""Finds the file with the image encoder of a GGUF model: mmproj-*.gguf next to it, Ollama's, or that of the model.

A folder can have such files for several models, in several types. One is used if it fits the model, and if its name is
that of the model or the folder has no other model. If several are left, the most precise one is: F32, BF16, F16, then
the others. A file that does not fit is named in a notice, and the model reads text only.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from quire.compute.gguf.header import PART
from quire.compute.gguf.source import GgufFile
from quire.compute.models import read_model
from quire.compute.models.source import ModelSource
from quire.compute.models.stores import MAX_FILES, MODEL_TYPE, gguf_models, image_encoders
from quire.core.config import AUTO, NO_IMAGES
from quire.core.errors import CheckpointError, ModelError
from quire.core.model_files import path_of

MAX_TRIED: Final = 8
PRECISIONS: Final = ("F32", "BF16", "F16")
SEPARATORS: Final = re.compile(r"[-_. ]+")
ENDING: Final = re.compile(r"\.gguf\Z", re.IGNORECASE)
MARK: Final = re.compile("mmproj", re.IGNORECASE)


def with_images(source: ModelSource, choice: str = AUTO) -> ModelSource:
    """Return a model with its image encoder; `choice`: a file, `auto` or `none`. Reads headers only.

    Raises `CheckpointError` if a file that is named does not fit the model.
    """
    if not isinstance(source, GgufFile):
        if choice in (AUTO, NO_IMAGES):
            return source
        message = f"mmproj is for models in GGUF files: {source.name} has its image encoder among its own files"
        raise ModelError(choice, message)
    if choice == NO_IMAGES:
        return replace(source, image_encoder=None)
    if choice != AUTO:
        path = path_of(choice)
        if not path.is_file():
            raise ModelError(choice, f"No file named {choice!r:.200}. mmproj takes a GGUF file, {AUTO} or {NO_IMAGES}")
        return _paired(source, path)
    if source.image_encoder is not None:
        return _first_that_fits(source, [source.image_encoder])
    beside = [source.path.with_name(name) for name in chosen(source.path.name, _names_beside(source.path))]
    if not beside and not _has_own(source):
        return source
    return _first_that_fits(source, beside or [source.path])


def chosen(model: str, names: Sequence[str]) -> list[str]:
    """Return the files with an image encoder that can be that of a model in a folder with these names, best first.

    >>> chosen("a-Q4_K_M.gguf", ["a-Q4_K_M.gguf", "mmproj-a-Q8_0.gguf", "mmproj-a-f16.gguf", "mmproj-b.gguf"])
    ['mmproj-a-f16.gguf', 'mmproj-a-Q8_0.gguf']
    >>> chosen("a-Q4_K_M.gguf", ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-model-f16.gguf"])
    ['mmproj-model-f16.gguf']
    >>> chosen("a.gguf", ["a.gguf", "b.gguf", "mmproj-model-f16.gguf"])
    []
    """
    encoders = image_encoders(list(names))
    own = [name for name in encoders if _stem(name) == _stem(model)]
    is_alone = len(set(map(_stem, gguf_models(list(names))))) <= 1
    return sorted(own or (encoders if is_alone else []), key=lambda name: (_rank(name), name))[:MAX_TRIED]


def _has_own(source: GgufFile) -> bool:
    try:
        return source.has_own_encoder
    except CheckpointError:  # who reads the model is told why
        return False


def _first_that_fits(source: GgufFile, paths: Sequence[Path]) -> GgufFile:
    source, problems = replace(source, image_encoder=None), list[str]()
    for path in paths:
        try:
            return _paired(source, path)
        except CheckpointError as error:
            problems.append(f"text only: the image encoder {path} is not used: {error}")
    return replace(source, notices=tuple(problems[:1]))


def _paired(source: GgufFile, path: Path) -> GgufFile:
    """Return a model with an image encoder; raises `CheckpointError` if they do not fit."""
    pair = replace(source, image_encoder=path)
    read_model(pair)
    return pair


def _names_beside(path: Path) -> list[str]:
    try:
        with os.scandir(path.parent) as entries:
            return [entry.name for entry in islice(entries, MAX_FILES)]
    except OSError:
        return []


def _stem(name: str) -> str:
    """Return the name of a model in that of a file, without its type, its part and the mark of an image encoder.

    >>> _stem("mmproj-SmolVLM-500M-Instruct-Q8_0.gguf") == _stem("SmolVLM-500M-Instruct-f16-00001-of-00002.gguf")
    True
    """
    split = PART.fullmatch(name)
    stem = ENDING.sub("", name) if split is None else split["stem"]
    return SEPARATORS.sub("-", MODEL_TYPE.sub("", MARK.sub("", stem))).strip("-").lower()


def _rank(name: str) -> int:
    found = MODEL_TYPE.search(name)
    kind = found[0].upper() if found else ""
    return PRECISIONS.index(kind) if kind in PRECISIONS else len(PRECISIONS)
