"""Projector: the image encoder of a GGUF model, which llama.cpp keeps in a file of its own, mmproj-*.gguf.

    model.gguf ────► text_config, model.*                                  ┐ config.json and tensors by name, as in the
    mmproj-*.gguf ─► vision_config, preprocessor_config.json, vision names ┘ folder from which both files were made

So families, image encoders and the readers of images do not know that there are two files; nor that Ollama has the
encoders of its newer models in the file of the text model (vision/kind.py). The two fit if the encoder
makes rows of the text model's size, for an architecture that it is made for, with a token that stands for images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from quire.compute.gguf.header import GgufHeader
from quire.compute.gguf.named_settings import Settings
from quire.compute.gguf.settings import CLASSIFIER, OF_IMAGES
from quire.compute.gguf.tensors import IMAGES, GgufEntry, GgufTensors, block_types_of
from quire.compute.gguf.vision.kind import IN_LAYER, EncoderFile, Kind, Object
from quire.compute.gguf.vision.kinds import KINDS, kind_of, own_encoder_of, own_settings
from quire.compute.models.config_file import ConfigFile
from quire.compute.weights.mapped_files import MappedFiles
from quire.core.errors import CheckpointError

ARCHITECTURE: Final = "general.architecture"
KIND_KEYS: Final = ("clip.vision.projector_type", "clip.projector_type")
VOCABULARY: Final = "tokenizer.ggml.tokens"
EMBEDDING: Final = "token_embd.weight"


@dataclass(frozen=True)
class Projector:
    """A file with an image encoder, next to the header of the text model; Ollama has both in one. Immutable."""

    header: GgufHeader
    text: GgufHeader
    kind: Kind
    file: EncoderFile

    @classmethod
    def read(cls, path: Path, text: GgufHeader) -> Projector:
        """Read the header of a file; raises `CheckpointError` if it has no encoder that quire runs, or does not fit."""
        header = text if path == text.path else GgufHeader.read(path)
        own = own_encoder_of(header)
        if own is not None:
            _require_fit(header, text, own.kind)
            prefixes = IMAGES[str(header.settings[ARCHITECTURE])]
            tensors = {name: each for name, each in header.tensors.items() if name.startswith(prefixes)}
            token = _token_for_images(text, own.kind)
            return cls(header, text, own.kind, EncoderFile(own_settings(header, own), tensors, *token))
        if header.settings.get(ARCHITECTURE) != OF_IMAGES:
            found = header.settings.get(ARCHITECTURE)
            raise CheckpointError(f"{path}: {ARCHITECTURE}", found, f"{OF_IMAGES}, an image encoder for a GGUF model")
        key = next((key for key in KIND_KEYS if key in header.settings), KIND_KEYS[-1])
        name = header.settings.get(key)
        if not isinstance(name, str) or name not in KINDS:
            raise CheckpointError(f"{path}: {key}", name, f"one of {', '.join(KINDS)}")
        kind = kind_of(name, header.tensors)
        _require_fit(header, text, kind)
        settings = Settings(ConfigFile(str(path), dict(header.settings)), f"{OF_IMAGES}.vision", header.tensors.keys())
        return cls(header, text, kind, EncoderFile(settings, header.tensors, *_token_for_images(text, kind)))

    @property
    def file_bytes(self) -> Mapping[Path, int]:
        """The sizes of the files of both."""
        return {**self.text.file_bytes, **self.header.file_bytes}

    def config(self, text_config: Object) -> Object:
        """Return config.json of the pair; `text_config` is that of the text model alone. Does not mutate."""
        architecture = str(self.text.settings[ARCHITECTURE])
        text = self.kind.text(
            text_config | {"model_type": self.kind.texts[architecture]}, self.file, self.text.settings
        )
        family = self.kind.families.get(architecture, self.kind.family)
        return {"architectures": [family], "text_config": text, **self.kind.config(self.file)}

    def processor(self) -> Object:
        """Return preprocessor_config.json of the pair. Does not mutate."""
        return self.kind.processor(self.file)

    def joined(self, text: Mapping[str, GgufEntry]) -> dict[str, GgufEntry]:
        """Return all tensors of the pair by name; `text` are those of the text model alone. Does not mutate."""
        entries = {self._outer(name): entry for name, entry in text.items()}
        pieces = dict[str, dict[int, GgufEntry]]()
        for stored, tensor in self.file.tensors.items():
            if stored in self.kind.unused or stored.startswith(self.kind.others):
                continue
            name = self.kind.name_of(stored, self.file)
            part = stored.rpartition(".")[0]
            if part.startswith(IN_LAYER):
                part = part.rpartition(".")[2]
            place, count = self.kind.pieces.get(stored, self.kind.pieces.get(part, (0, 1)))
            if name in entries or place in (found := pieces.setdefault(name, {})):
                raise CheckpointError(f"{self.header.path}: tensor {stored!r}", "given twice", "each once")
            found[place] = self.kind.entry(self.file, part, tensor)
            if len(found) == count:
                entries[name] = self._joined([found[place] for place in range(count)], stored)
        return entries

    def _joined(self, pieces: list[GgufEntry], stored: str) -> GgufEntry:
        """Return one entry for tensors that are its pieces."""
        shapes = [piece.tensor.shape for piece in pieces]
        if any(shape != shapes[0] for shape in shapes):
            where = f"{self.header.path}: tensor {stored!r}"
            raise CheckpointError(
                where, f"of the shape {list(shapes[-1])}", f"{list(shapes[0])}, as the piece before it"
            )
        return replace(pieces[0], others=tuple(piece.tensor for piece in pieces[1:]))

    def stored_name(self, name: str) -> str | None:
        """Return the name of a tensor in the file of the image encoder; None if only a text model has it."""
        stored = self.kind.stored(name, self.file)
        return stored if stored != name or name in self.file.tensors else None

    def inner(self, name: str) -> str:
        """Return the name of a tensor of the text model alone."""
        alone, together = self.kind.text_names
        return alone + name.removeprefix(together) if name.startswith(together) else name

    def _outer(self, name: str) -> str:
        """Return the name of a tensor of the text model next to an image encoder."""
        alone, together = self.kind.text_names
        return together + name.removeprefix(alone) if name.startswith(alone) else name


def _token_for_images(text: GgufHeader, kind: Kind) -> tuple[str, int]:
    """Return the token that stands for images, and its id."""
    listed: Any = text.settings.get(VOCABULARY)
    vocabulary: list[object] = listed if isinstance(listed, list) else []
    known = frozenset(vocabulary)
    embedding = text.tensors.get(EMBEDDING)
    rows = embedding.shape[0] if embedding is not None else len(vocabulary)
    token = next((token for token in kind.tokens if token in known and vocabulary.index(token) < rows), None)
    if token is None:
        where, allowed = f"{text.path}: {VOCABULARY}", "a token that stands for images"
        raise CheckpointError(where, f"without {kind.tokens[0]}", allowed)
    return token, vocabulary.index(token)


def _require_fit(header: GgufHeader, text: GgufHeader, kind: Kind) -> None:
    """Raise unless an image encoder is for this text model."""
    where, architecture = f"{header.path} for {text.path.name}", text.settings.get(ARCHITECTURE)
    if not isinstance(architecture, str) or architecture not in kind.texts:
        found = f"a text model of the architecture {architecture!r:.40}"
        raise CheckpointError(where, found, f"one of {', '.join(kind.texts)}")
    if CLASSIFIER in text.tensors:
        raise CheckpointError(where, "a text model with labels", "one that generates text")
    name, dimension = kind.output
    output, size = header.tensors.get(name), text.settings.get(f"{architecture}.embedding_length")
    if output is None or len(output.shape) != 2:
        raise CheckpointError(
            f"{header.path}: tensor {name}", "missing" if output is None else output.shape, "a matrix"
        )
    if output.shape[dimension] != size:
        found = f"a text model with rows of {size!r:.40} numbers"
        raise CheckpointError(where, found, f"{output.shape[dimension]} numbers, which this image encoder makes")


class PairTensors(GgufTensors):
    """The tensors of a GGUF model and of its image encoder."""

    def __init__(self, projector: Projector) -> None:
        super().__init__(projector.text)
        self.entries = MappingProxyType(projector.joined(self.entries))
        self.block_types = block_types_of(self.entries)
        self._projector = projector
        self._files = MappedFiles(projector.file_bytes)

    @property
    def name(self) -> str:
        """The name of the file, or the names of both."""
        text, images = self._projector.text.path, self._projector.header.path
        return str(text) if images == text else f"{text} with {images.name}"

    def stored_name(self, name: str) -> str:
        """Return a file's name for a tensor; the file need not have it."""
        return self._projector.stored_name(name) or super().stored_name(self._projector.inner(name))
