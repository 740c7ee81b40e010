"""Models that other programs store on this machine, found by the names that these programs use.

    qwen3:0.6b, owner/name:tag, hf.co/owner/name:Q4_K_M    Ollama: a manifest names a blob, which is a GGUF file,
                                                           and perhaps a second one with an image encoder
    owner/name, owner/name:Q4_K_M                          LM Studio: a folder of GGUF files

quire only reads files: it writes nothing, and runs no other program.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Final

from quire.compute.gguf.header import is_gguf
from quire.compute.gguf.source import GgufFile, has_image_encoder, is_later_part
from quire.compute.models.config_file import GENERATION_CONFIG_FILE
from quire.compute.models.generation import penalty_of
from quire.core.errors import CheckpointError, ModelError
from quire.core.model_files import MAX_SETTINGS_BYTES, read_json_object

PART: Final = r"[A-Za-z0-9][\w.-]{0,95}"
NAME: Final = re.compile(rf"(?P<path>{PART}(/{PART}){{0,2}})(:(?P<tag>{PART}))?", re.ASCII)
"""At most HOST/OWNER/NAME:TAG. No part begins with a dot, so none leads out of a store."""

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
MODEL_LAYER: Final = "application/vnd.ollama.image.model"
IMAGES_LAYER: Final = "application/vnd.ollama.image.projector"
PARAMS_LAYER: Final = "application/vnd.ollama.image.params"
DEFAULTS: Final = MappingProxyType(
    {"stop": "stop_strings", "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
)
"""An Ollama parameter → the setting with the same meaning in generation_config.json."""

SERVICE_STORE: Final = Path("/usr/share/ollama/.ollama/models")
"""Where Ollama keeps models if its Linux installer made it a service."""

MODEL_TYPE: Final = re.compile(r"(?<![A-Za-z0-9])(I?Q\d\w*|BF16|F16|F32)(?![A-Za-z0-9])", re.ASCII | re.IGNORECASE)
"""The type of the numbers in the name of a GGUF file."""

REGISTRY: Final = "registry.ollama.ai"
LIBRARY: Final = "library"
MAX_MANIFEST_BYTES: Final = 1 << 20
MAX_FILES: Final = 10_000
MAX_NAMED: Final = 8


@dataclass(frozen=True)
class OllamaModel(GgufFile):
    """A GGUF file in Ollama's store, with Ollama's JSON file of sampling defaults for it."""

    params: Path

    def json_object(self, file: str, max_bytes: int = MAX_SETTINGS_BYTES) -> dict[str, object]:
        """Return the settings that a file of this name would contain."""
        found = super().json_object(file, max_bytes)
        if file != GENERATION_CONFIG_FILE:
            return found
        params = read_json_object(self.params, MAX_MANIFEST_BYTES)
        found |= {ours: params[theirs] for theirs, ours in DEFAULTS.items() if theirs in params}
        return found | penalty_of(params.get("repeat_penalty"), params.get("repeat_last_n"))


def find_stored(name: str, home: Path, environ: Mapping[str, str]) -> GgufFile | None:
    """Return the model that another program stores under a name, or None. Reads names, no model."""
    parsed = NAME.fullmatch(name)
    if parsed is None:
        return None
    parts, tag = parsed["path"].split("/"), parsed["tag"]
    in_ollama = (_in_ollama(parts, tag, store) for store in ollama_stores(home, environ))
    return next(filter(None, in_ollama), None) or _in_lm_studio(parts, tag, home)


def ollama_stores(home: Path, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """Return the folders in which Ollama stores models, whether or not they exist."""
    named = environ.get("OLLAMA_MODELS")
    return (Path(named),) if named else (home / ".ollama" / "models", SERVICE_STORE)


def why_unreadable(store: Path) -> str:
    """Return the reason why this user cannot read a folder; empty if readable, or if it does not exist."""
    try:
        os.scandir(store).close()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return error.strerror or type(error).__name__
    return ""


def lm_studio_stores(home: Path) -> tuple[Path, ...]:
    """Return the folders in which LM Studio stores models, whether or not they exist."""
    return home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"


def _in_ollama(parts: list[str], tag: str | None, store: Path) -> GgufFile | None:
    owned = parts if len(parts) > 1 else [LIBRARY, *parts]
    manifest = store.joinpath("manifests", *([REGISTRY, *owned] if len(owned) < 3 else owned), tag or "latest")
    return model_of_manifest(manifest, store) if os.path.isfile(manifest) else None  # no error where it is unreadable


def model_of_manifest(manifest: Path, store: Path) -> GgufFile:
    """Return the model that a manifest in Ollama's store names. Reads the manifest, no model."""
    layers = _layers(manifest)
    if MODEL_LAYER not in layers:
        raise CheckpointError(f"{manifest}: layers", "without a model", f"one of {MODEL_LAYER}")
    blob = store / "blobs" / layers[MODEL_LAYER]
    if not blob.exists():
        raise ModelError(str(blob), f"{blob} is named by {manifest}, but is not there. Fetch it again: ollama pull")
    images = store / "blobs" / layers[IMAGES_LAYER] if IMAGES_LAYER in layers else None
    if PARAMS_LAYER not in layers:
        return GgufFile(blob, image_encoder=images)
    return OllamaModel(blob, store / "blobs" / layers[PARAMS_LAYER], image_encoder=images)


def _layers(manifest: Path) -> dict[str, str]:
    """Return the name of the blob of each layer that we read."""
    layers = read_json_object(manifest, MAX_MANIFEST_BYTES).get("layers")
    blobs: dict[str, str] = {}
    for layer in layers if isinstance(layers, list) else ():
        kind = layer.get("mediaType") if isinstance(layer, dict) else None
        if kind in (MODEL_LAYER, PARAMS_LAYER, IMAGES_LAYER):
            digest = layer.get("digest")
            if not isinstance(digest, str) or not DIGEST.fullmatch(digest):
                raise CheckpointError(f"{manifest}: digest", digest, "sha256: and 64 hexadecimal digits")
            blobs.setdefault(kind, digest.replace(":", "-"))
    return blobs


def _in_lm_studio(parts: list[str], tag: str | None, home: Path) -> GgufFile | None:
    if len(parts) != 2:
        return None
    for store in lm_studio_stores(home):
        folder = store.joinpath(*parts)
        if folder.is_dir():
            return only_gguf(folder, tag)
    return None


def only_gguf(folder: Path, tag: str | None = None) -> GgufFile | None:
    """Return the only GGUF model in a folder, of the type `tag` if it is given; None if there is none."""
    names = [path.name for path in islice(folder.iterdir(), MAX_FILES)]
    found = gguf_models(names) if tag is None else models_of_type(names, tag)
    if len(found) > 1:
        some = ", ".join(found[:MAX_NAMED])
        raise ModelError(str(folder), f"{folder} has several models. Name one of its files: {some}")
    return GgufFile(folder / found[0]) if found else None


def models_of_type(names: list[str], kind: str) -> list[str]:
    """Return the file names of GGUF models of a type, or if there is none, of those in whose name a word begins so.

    >>> models_of_type(["m-BF16.gguf", "m-F16.gguf"], "f16"), models_of_type(["m-BF16.gguf", "m-Q6_K_L.gguf"], "Q6")
    (['m-F16.gguf'], ['m-Q6_K_L.gguf'])
    """
    models = gguf_models(names)
    begun = re.compile(rf"(?<![A-Za-z0-9]){re.escape(kind)}", re.ASCII | re.IGNORECASE)
    exact = [name for name in models if kind.lower() in types_in(name)]
    return exact or [name for name in models if begun.search(name)]


def types_in(name: str) -> frozenset[str]:
    """Return the types in the name of a GGUF file, in lower case."""
    return frozenset(map(str.lower, MODEL_TYPE.findall(name)))


def gguf_models(names: list[str]) -> list[str]:
    """Return the file names of GGUF models, sorted; leaves out later parts of a model, and image encoders.

    >>> gguf_models(["b-Q8_0.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf", "mmproj-b.gguf", "notes.txt"])
    ['a-00001-of-00002.gguf', 'b-Q8_0.gguf']
    """
    paths = map(Path, names)
    found = (path.name for path in paths if is_gguf(path) and not is_later_part(path))
    return sorted(name for name in found if not has_image_encoder(name))


def image_encoders(names: list[str]) -> list[str]:
    """Return the file names of image encoders for GGUF models, sorted."""
    return sorted(name for name in names if is_gguf(Path(name)) and has_image_encoder(name))
