"""Models that other programs keep on this machine, found by the names that people know from there.

    qwen3:0.6b, owner/name:tag, hf.co/owner/name:Q4_K_M    Ollama: a manifest names a blob, which is a GGUF file
    owner/name, owner/name:Q4_K_M                          LM Studio: a folder of GGUF files

Only files that are there are looked at. Nothing is written, and no other program is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from quire.compute.gguf.source import GgufFile, is_gguf, is_later_part
from quire.core.errors import CheckpointError, ModelError
from quire.core.model_files import read_json_object

PART: Final = r"[A-Za-z0-9][\w.-]{0,95}"
NAME: Final = re.compile(rf"(?P<path>{PART}(/{PART}){{0,2}})(:(?P<tag>{PART}))?", re.ASCII)
"""At most HOST/OWNER/NAME:TAG. No part begins with a dot, so none leads out of a store."""

DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
MODEL_LAYER: Final = "application/vnd.ollama.image.model"
REGISTRY: Final = "registry.ollama.ai"
MAX_FILES: Final = 10_000
MAX_NAMED: Final = 8


def find_stored(name: str, home: Path, environ: Mapping[str, str]) -> GgufFile | None:
    """Return the model that another program keeps by a name; None where none does. Reads names, no model."""
    parsed = NAME.fullmatch(name)
    if parsed is None:
        return None
    parts, tag = parsed["path"].split("/"), parsed["tag"]
    return _in_ollama(parts, tag, home, environ) or _in_lm_studio(parts, tag, home)


def _in_ollama(parts: list[str], tag: str | None, home: Path, environ: Mapping[str, str]) -> GgufFile | None:
    store = Path(environ.get("OLLAMA_MODELS") or home / ".ollama" / "models")
    owned = parts if len(parts) > 1 else ["library", *parts]
    manifest = store.joinpath("manifests", *([REGISTRY, *owned] if len(owned) < 3 else owned), tag or "latest")
    if not manifest.is_file():
        return None
    blob = store / "blobs" / _model_digest(manifest).replace(":", "-")
    if not blob.exists():
        raise ModelError(str(blob), f"{blob} is named by {manifest}, but is not there. Fetch it again: ollama pull")
    return GgufFile(blob)


def _model_digest(manifest: Path) -> str:
    """Return the digest of the model in a manifest."""
    layers = read_json_object(manifest).get("layers")
    for layer in layers if isinstance(layers, list) else ():
        if isinstance(layer, dict) and layer.get("mediaType") == MODEL_LAYER:
            digest = layer.get("digest")
            if isinstance(digest, str) and DIGEST.fullmatch(digest):
                return digest
            raise CheckpointError(f"{manifest}: digest", digest, "sha256: and 64 hexadecimal digits")
    raise CheckpointError(f"{manifest}: layers", "without a model", f"one of {MODEL_LAYER}")


def _in_lm_studio(parts: list[str], tag: str | None, home: Path) -> GgufFile | None:
    if len(parts) != 2:
        return None
    for store in (home / ".lmstudio" / "models", home / ".cache" / "lm-studio" / "models"):
        folder = store.joinpath(*parts)
        if folder.is_dir():
            return only_gguf(folder, tag)
    return None


def only_gguf(folder: Path, tag: str | None = None) -> GgufFile | None:
    """Return the one GGUF model in a folder, of those with `tag` in their names; None where there is none."""
    names = (path for path in islice(folder.iterdir(), MAX_FILES) if is_gguf(path) and not is_later_part(path))
    found = sorted(path for path in names if tag is None or tag.lower() in path.name.lower())
    if len(found) > 1:
        some = ", ".join(path.name for path in found[:MAX_NAMED])
        raise ModelError(str(folder), f"{folder} has several models. Name one of its files: {some}")
    return GgufFile(found[0]) if found else None
