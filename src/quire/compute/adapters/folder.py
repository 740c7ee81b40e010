"""An adapter's PEFT folder or GGUF file, checked against its model: names, shapes, ranks.

    base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight   [rank, in]
    base_model.model.model.layers.3.self_attn.q_proj.lora_B.weight   [out, rank]

A module is found by its name in the model's own checkpoint (places.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from quire.compute.adapters.places import INNER, Module, Place, bare_name, modules_of
from quire.compute.adapters.settings import SETTINGS_FILE, AdapterSettings
from quire.compute.arrays import FloatArray
from quire.compute.gguf.header import GgufHeader, is_gguf
from quire.compute.models.base import DecoderSpec
from quire.compute.models.config_file import ConfigFile
from quire.compute.models.parts import Part
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.safetensors import read_header
from quire.core.errors import CheckpointError
from quire.core.model_files import is_there, open_model_file, read_json_object

if TYPE_CHECKING:
    from quire.compute.adapters.gguf import GgufAdapter

WEIGHTS_FILE: Final = "adapter_model.safetensors"
PICKLE_FILE: Final = "adapter_model.bin"
RANK_STEP: Final = 16
"""Engines compute a rank rounded up to a multiple of this; the rest is zeros."""

NAME: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<which>[AB])(?:\.default)?\.weight")
DIGEST_BYTES: Final = 16
MATRIX_DIMENSIONS: Final = 2
CHUNK_BYTES: Final = 1 << 20
MAX_NAMED: Final = 8


def padded(rank: int) -> int:
    """Return the rank that engines compute.

    >>> padded(1), padded(16), padded(17)
    (16, 16, 32)
    """
    return -(-rank // RANK_STEP) * RANK_STEP


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A matrix that an adapter changes, and the adapter's tensors for it."""

    module: str
    a: str
    b: str
    rank: int
    scale: float
    place: Place
    cuts: tuple[slice, slice]  # its rows of A, and its columns of B

    @property
    def padded_rank(self) -> int:
        """The rank that engines compute."""
        return padded(self.rank)


@dataclass(frozen=True, slots=True)
class LowRank:
    """A, [rank, in], and B, [out, rank], of a matrix, with zeros up to a multiple of 16; the scale of B A."""

    layer: int
    part: Part
    expert: int
    a: FloatArray
    b: FloatArray
    scale: float


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter on disk that fits a model. `digest` is computed from the content of its files, not their names."""

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
        """Return its size in memory, with numbers of this many bytes."""
        sizes = ((each.padded_rank, each.place.num_outputs + each.place.num_inputs) for each in self.matrices)
        return dtype_bytes * sum(rank * size for rank, size in sizes)

    def read(self) -> Iterator[LowRank]:
        """Yield the matrices; raises `CheckpointError` if files have changed or contain NaN or infinity."""
        if _digest(self.folder) != self.digest:
            raise CheckpointError(str(self.folder), "files that have changed", "the adapter that was checked")
        tensors = _tensors(self.folder, self.spec)
        for (a, b), matrices in groupby(self.matrices, key=lambda each: (each.a, each.b)):
            whole_a, whole_b = tensors.tensor(a), tensors.tensor(b)
            for name, numbers in ((a, whole_a), (b, whole_b)):
                if not np.isfinite(numbers).all():
                    raise CheckpointError(f"{tensors.name}: tensor {name!r}", "NaN or infinity", "finite numbers")
            for each in matrices:
                place, padding, (rows, columns) = each.place, each.padded_rank - each.rank, each.cuts
                padded_a = np.pad(whole_a[rows], ((0, padding), (0, 0)))
                padded_b = np.pad(whole_b[place.rows][:, columns], ((0, 0), (0, padding)))
                yield LowRank(place.layer, place.part, place.expert, padded_a, padded_b, each.scale)


def read_adapter(folder: Path, spec: DecoderSpec, max_rank: int, digest: str | None = None) -> Adapter:
    """Return the adapter in a folder; raises `CheckpointError` unless it fits a model of this spec.

    Reads its settings and the header of its weights. A given `digest` is not verified here: reading the weights
    compares it with the files.
    """
    if not is_gguf(folder) and not is_there(folder / SETTINGS_FILE):
        allowed = f"a folder with {SETTINGS_FILE} and {WEIGHTS_FILE}, or an adapter's GGUF file"
        raise CheckpointError("adapter", str(folder), allowed)
    digest, base = digest or _digest(folder), None
    if is_gguf(folder):
        from quire.compute.adapters.gguf import gguf_settings

        settings = gguf_settings(GgufHeader.read_one(folder))
    else:
        file = ConfigFile(str(folder / SETTINGS_FILE), read_json_object(folder / SETTINGS_FILE))
        settings, base = AdapterSettings.of(file), file.fields.get("base_model_name_or_path")
    tensors = _tensors(folder, spec)
    matrices = tuple(_matrices(tensors, spec, settings, max_rank))
    return Adapter(folder, digest, matrices, base if isinstance(base, str) else "", spec)


def _matrices(
    tensors: Checkpoint | GgufAdapter, spec: DecoderSpec, settings: AdapterSettings, max_rank: int
) -> Iterator[AdaptedMatrix]:
    modules, found = modules_of(spec), dict[str, dict[str, str]]()
    taken: dict[tuple[int, Part, int], str] = {}
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
        if bare_name(module) not in modules:
            some = sorted({name.rpartition(".")[2] for name in modules if not name.endswith(INNER)})[:MAX_NAMED]
            allowed = f"a matrix of the {len(spec.layers)} layers that can have an adapter: {', '.join(some)}"
            raise CheckpointError(tensors.name, module, allowed)
        found_shapes = {which: tensors.entries[name].shape for which, name in pair.items()}
        for which, shape in found_shapes.items():
            if len(shape) != MATRIX_DIMENSIONS:
                raise CheckpointError(f"{where}.lora_{which}: shape", list(shape), "a matrix")
        matching = _matching(modules[bare_name(module)], found_shapes)
        num_ranks = found_shapes["A"][0] // max(matching.count, 1)
        rank = settings.rank_of(matching.full_name(module), num_ranks)
        if not 0 < rank <= max_rank:
            raise CheckpointError(f"{where}: rank", rank, f"at most {max_rank}, the max_adapter_rank")
        for which, shape in matching.shapes(rank).items():
            if found_shapes[which] != shape:
                allowed = f"{list(shape)} for this model"
                raise CheckpointError(f"{where}.lora_{which}: shape", list(found_shapes[which]), allowed)
        scale = settings.scale_of(matching.full_name(module), rank)
        for place in matching.places:
            if (other := taken.setdefault((place.layer, place.part, place.expert), module)) is not module:
                raise CheckpointError(where, f"the same matrix as {other}", "each matrix once")
            cuts = matching.cuts(place, rank)
            yield AdaptedMatrix(module, pair["A"], pair["B"], rank, scale * place.factor, place, cuts)


def _matching(modules: Sequence[Module], shapes: Mapping[str, tuple[int, ...]]) -> Module:
    """Return the module that A and B are for; the first if none has their inputs and outputs."""
    sizes = shapes["A"][-1:] + shapes["B"][:1]
    return next((each for each in modules if (each.num_inputs, each.num_outputs) == sizes), modules[0])


def _tensors(folder: Path, spec: DecoderSpec) -> Checkpoint | GgufAdapter:
    if is_gguf(folder):
        from quire.compute.adapters.gguf import GgufAdapter

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
