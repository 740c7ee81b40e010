"""The weights of an image encoder around its tower, checked against its spec before use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.vision import or_texts_only
from quire.compute.models.vision.spec import Matrix, VisionSpec
from quire.compute.weights.decoder_weights import NUMBER_BYTES, PartWeights, WeightReader, weight_bytes
from quire.compute.weights.weight_file import WeightFile
from quire.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Matrices, norms and vectors by the name of their weight or stem; the table of positions, and the first row."""

    matrices: Mapping[str, PartWeights]
    norms: Mapping[str, PartWeights]
    vectors: Mapping[str, FloatArray]
    positions: FloatArray | None
    first: FloatArray | None

    @classmethod
    def load(cls, spec: VisionSpec, checkpoint: WeightFile, dtype: str) -> VisionWeights:
        """Read the tensors of a spec that is `fitted`, matrices in `dtype`."""
        patches = spec.patches
        return cls(
            {each.weight: _matrix(each, checkpoint, dtype) for each, _ in spec.products()},
            {each.stem: _norm(each.stem, checkpoint) for each in spec.norms()},
            {name: checkpoint.tensor(name) for name, _ in spec.vectors()},
            checkpoint.tensor(patches.positions).reshape(patches.positions_shape) if patches.positions else None,
            checkpoint.tensor(patches.first).reshape(-1) if patches.first else None,
        )

    def without_matrices(self) -> VisionWeights:
        """Return the rest, when an engine has packed the matrices."""
        return replace(self, matrices={})


def own_tensors(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor around the tower."""
    patches, size = spec.patches, spec.tower.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for each, _ in spec.products():
        shapes[each.weight] = each.shape
        if each.bias:
            shapes[each.bias] = (each.num_outputs,)
    for norm in spec.norms():
        shape = norm.spec.shape(norm.size)
        shapes[f"{norm.stem}.weight"] = shape.weight
        if shape.bias:
            shapes[f"{norm.stem}.bias"] = shape.weight
    shapes |= {name: (size,) for name, size in spec.vectors()}
    if patches.positions:
        shapes[patches.positions] = patches.positions_shape
    if patches.first:
        shapes[patches.first] = (size,)
    return shapes


def fitted(spec: VisionSpec, checkpoint: WeightFile) -> VisionSpec:
    """Return the spec with the names of a checkpoint; its tower ignores all other tensors.

    Raises `CheckpointError` unless the checkpoint has exactly the tensors of the encoder, with their shapes.
    """
    with or_texts_only():
        if not any(name.startswith(spec.optional_prefix) for name in checkpoint.entries):
            spec = spec.without_optional_prefix()
        own = own_tensors(spec)
        for name, shape in own.items():
            _check(checkpoint, name, shape, of_one=name in (spec.patches.positions, spec.patches.first))
        others = {name for name in checkpoint.entries if not name.startswith(spec.prefixes)}
        ignored = spec.tower.ignored_tensors | others | own.keys()
        spec = replace(spec, tower=replace(spec.tower, ignored_tensors=ignored))
        WeightReader(spec.tower, checkpoint, "float32")  # raises for a tensor of the tower
    return spec


def _check(checkpoint: WeightFile, name: str, shape: tuple[int, ...], *, of_one: bool) -> None:
    """Raise unless a tensor has this shape; `of_one`: or the shape of a batch of one image."""
    found = checkpoint.entries[name].shape if name in checkpoint.entries else None
    if found is None or found[-len(shape) :] != shape or any(each != 1 or not of_one for each in found[: -len(shape)]):
        stored = f"{checkpoint.name}: tensor {checkpoint.stored_name(name)}"
        raise CheckpointError(stored, "missing" if found is None else list(found), f"shape {list(shape)}")
    checkpoint.require_floats(name)


def vision_bytes(
    spec: VisionSpec, dtype: str, block_types: Mapping[str, str] = MappingProxyType({}), *, compact: bool = False
) -> int:
    """Return the bytes of the weights in memory, those of the tower included; `compact`: as in `weight_bytes`."""
    tensors = own_tensors(spec)
    matrices = {each.weight for each, _ in spec.products()}
    num_bytes = sum(
        math.prod(shape) * NUMBER_BYTES[dtype if name in matrices else "float32"] for name, shape in tensors.items()
    )
    return num_bytes + weight_bytes(spec.tower, dtype, "auto", block_types, compact=compact)


def _matrix(matrix: Matrix, checkpoint: WeightFile, dtype: str) -> PartWeights:
    read = checkpoint.bfloat16_bits if dtype == "bfloat16" else checkpoint.tensor
    weight = read(matrix.weight)
    rows = weight.T if matrix.transposed else weight.reshape(matrix.num_outputs, -1)
    bias = np.ascontiguousarray(checkpoint.tensor(matrix.bias)) if matrix.bias else None
    return PartWeights(np.ascontiguousarray(rows), bias)


def _norm(stem: str, checkpoint: WeightFile) -> PartWeights:
    bias = f"{stem}.bias"
    return PartWeights(
        checkpoint.tensor(f"{stem}.weight"), checkpoint.tensor(bias) if bias in checkpoint.entries else None
    )
