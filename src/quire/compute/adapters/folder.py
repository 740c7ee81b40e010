"""A folder that PEFT has saved, or a file of GGUF, checked against the model that it is for: names, shapes, ranks.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [out, rank]

A module is found by the name that the model's own checkpoint has for it. Where that fuses several matrices, they share
A, and each has its rows of B.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from quire.compute.adapters.gguf import GgufAdapter, gguf_settings, is_gguf
from quire.compute.adapters.settings import SETTINGS_FILE, AdapterSettings
from quire.compute.arrays import FloatArray
from quire.compute.gguf.header import GgufHeader
from quire.compute.models.base import DecoderSpec, Part
from quire.compute.models.config_file import ConfigFile
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import expected_tensors
from quire.compute.weights.safetensors import read_header
from quire.core.errors import CheckpointError
from quire.core.model_files import is_there, open_model_file, read_json_object

WEIGHTS_FILE: Final = "adapter_model.safetensors"
PICKLE_FILE: Final = "adapter_model.bin"
RANK_STEP: Final = 16
"""Engines compute a rank rounded up to a multiple of this; the rest is zeros."""

ADAPTED: Final = (Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT, Part.GATE, Part.UP, Part.DOWN)
NAME: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
PREFIXES: Final = ("model.language_model.", "language_model.model.", "language_model.", "model.", "transformer.")
"""Before the layers, by release and by how a model was opened for training."""

DIGEST_BYTES: Final = 16
CHUNK_BYTES: Final = 1 << 20
MAX_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix of a layer that an adapter changes, and the tensors that it has for it."""

    layer: int
    part: Part
    module: str
    a: str
    b: str
    rows: slice | list[int]  # of B
    rank: int
    scale: float
    shape: tuple[int, int]  # of the matrix

    @property
    def padded_rank(self) -> int:
        """The rank that engines compute."""
        return -(-self.rank // RANK_STEP) * RANK_STEP


@dataclass(frozen=True, slots=True)
class LowRank:
    """A, [rank, in], and B, [out, rank], of a matrix, with zeros up to a multiple of 16; the scale of B A."""

    layer: int
    part: Part
    a: FloatArray
    b: FloatArray
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on disk that fits a model. `digest` is that of its files, whatever they are called."""

    folder: Path
    digest: str
    matrices: tuple[AdaptedMatrix, ...]
    base: str
    spec: DecoderSpec

    @property
    def rank(self) -> int:
        """The highest rank."""
        return max(each.rank for each in self.matrices)

    def num_bytes(self, dtype_bytes: int = 2) -> int:
        """Return the bytes that it takes in memory, with numbers of this size."""
        return dtype_bytes * sum(each.padded_rank * sum(each.shape) for each in self.matrices)

    def read(self) -> Iterator[LowRank]:
        """Yield the matrices; raises `CheckpointError` for files that have changed and for NaN or infinity."""
        if _digest(self.folder) != self.digest:
            raise CheckpointError(str(self.folder), "files that have changed", "the adapter that was checked")
        tensors = _tensors(self.folder, self.spec)
        for each in self.matrices:
            a, b = tensors.tensor(each.a), tensors.tensor(each.b)[each.rows]
            for name, numbers in ((each.a, a), (each.b, b)):
                if not np.isfinite(numbers).all():
                    raise CheckpointError(f"{tensors.name}: tensor {name!r}", "NaN or infinity", "finite numbers")
            padding = each.padded_rank - each.rank
            padded_a, padded_b = np.pad(a, ((0, padding), (0, 0))), np.pad(b, ((0, 0), (0, padding)))
            yield LowRank(each.layer, each.part, padded_a, padded_b, each.scale)


def read_adapter(folder: Path, spec: DecoderSpec, max_rank: int, digest: str | None = None) -> Adapter:
    """Return the adapter in a folder; raises `CheckpointError` unless it fits a model of this spec.

    Reads its settings and the header of its weights. A digest that is given is not taken again here: reading the
    weights compares it with the files.
    """
    digest, base = digest or _digest(folder), None
    if is_gguf(folder):
        settings = gguf_settings(GgufHeader.read_one(folder))
    else:
        file = ConfigFile(str(folder / SETTINGS_FILE), read_json_object(folder / SETTINGS_FILE))
        settings, base = AdapterSettings.of(file), file.fields.get("base_model_name_or_path")
    tensors = _tensors(folder, spec)
    if spec.attention.latent is not None:
        raise CheckpointError(str(folder), "an adapter", "none: models with latent attention cannot have one yet")
    matrices = tuple(_matrices(tensors, spec, settings, max_rank))
    return Adapter(folder, digest, matrices, base if isinstance(base, str) else "", spec)


def _matrices(
    tensors: Checkpoint | GgufAdapter, spec: DecoderSpec, settings: AdapterSettings, max_rank: int
) -> Iterator[AdaptedMatrix]:
    places, found = _places(spec), dict[str, dict[str, str]]()
    for name in tensors.entries:
        match = NAME.fullmatch(name)
        if match is None:
            allowed = "only lora_A and lora_B of modules"
            raise CheckpointError(f"{tensors.name}: tensor {name!r}", "not of LoRA", allowed)
        tensors.require_floats(name)
        pair = found.setdefault(match["module"], {})
        if match["which"] in pair:
            raise CheckpointError(f"{tensors.name}: {match['module']}", "a matrix twice", "one A and one B")
        pair[match["which"]] = name
    if not found:
        raise CheckpointError(tensors.name, "no tensors", "lora_A and lora_B of modules")
    for module, pair in found.items():
        where = f"{tensors.name}: {module}"
        if pair.keys() != {"A", "B"}:
            raise CheckpointError(where, f"lora_{next(iter(pair))} alone", "lora_A and lora_B")
        parts = places.get(_bare(module))
        if not parts:
            some = sorted({name.rpartition(".")[2] for name in places})[:MAX_NAMED]
            allowed = f"a matrix of the {len(spec.layers)} layers that can have an adapter: {', '.join(some)}"
            raise CheckpointError(tensors.name, module, allowed)
        rank = settings.rank_of(module, tensors.entries[pair["A"]].shape[0])
        total, num_inputs = parts[0].tensor_shape
        if rank > max_rank:
            raise CheckpointError(f"{where}: rank", rank, f"at most {max_rank}, the max_adapter_rank")
        for which, shape in (("A", (rank, num_inputs)), ("B", (total, rank))):
            if tensors.entries[pair[which]].shape != shape:
                found_shape = list(tensors.entries[pair[which]].shape)
                raise CheckpointError(f"{where}.lora_{which}: shape", found_shape, f"{list(shape)} for this model")
        scale = settings.scale_of(module, rank)
        for place in parts:
            rows = spec.sources[place.part].rows_of(place.num_outputs)
            shape = place.num_outputs, num_inputs
            yield AdaptedMatrix(place.layer, place.part, module, pair["A"], pair["B"], rows, rank, scale, shape)


@dataclass(frozen=True, slots=True)
class _Place:
    """A matrix of the model, and the shape [out, in] of the tensor that has it."""

    layer: int
    part: Part
    num_outputs: int
    tensor_shape: tuple[int, int]


def _places(spec: DecoderSpec) -> dict[str, list[_Place]]:
    """Return the matrices that can have an adapter, by the bare name of their tensor."""
    shapes, places = expected_tensors(spec), dict[str, list[_Place]]()
    for index, layer in enumerate(spec.layers):
        for part, shape in spec.layer_parts(layer).items():
            if part in ADAPTED:
                source = spec.sources[part]
                stem = source.stem_of(index)
                tensor = shapes[f"{stem}.weight"]
                tensor_shape = (tensor[1], tensor[0]) if source.transposed else (tensor[0], tensor[1])
                place = _Place(index, part, shape.weight[0], tensor_shape)
                places.setdefault(_bare(stem), []).append(place)
    return places


def _bare(module: str) -> str:
    """Return the name of a module from its layer on.

    >>> _bare("model.language_model.layers.0.mlp.up_proj"), _bare("transformer.h.0.attn.c_attn")
    ('layers.0.mlp.up_proj', 'h.0.attn.c_attn')
    """
    return next((module.removeprefix(prefix) for prefix in PREFIXES if module.startswith(prefix)), module)


def _tensors(folder: Path, spec: DecoderSpec) -> Checkpoint | GgufAdapter:
    if is_gguf(folder):
        return GgufAdapter(GgufHeader.read_one(folder), spec)
    return Checkpoint(folder, read_header(_weights(folder)))


def _weights(folder: Path) -> Path:
    if not is_there(folder / WEIGHTS_FILE) and is_there(folder / PICKLE_FILE):
        raise CheckpointError(str(folder), PICKLE_FILE, f"{WEIGHTS_FILE}: a pickle can run any code")
    return folder / WEIGHTS_FILE


def _digest(folder: Path) -> str:
    """Return the digest of the files of an adapter: equal only for equal files."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for path in [folder] if is_gguf(folder) else [folder / SETTINGS_FILE, _weights(folder)]:
        of_file = hashlib.blake2b()
        with open_model_file(path) as file:
            while data := file.read(CHUNK_BYTES):
                of_file.update(data)
        digest.update(of_file.digest())
    return digest.hexdigest()
