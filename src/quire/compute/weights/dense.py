"""Dense: a layer after the pooling, through which a vector goes before it is cut and scaled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from quire.compute.arrays import FloatArray
from quire.compute.models.pooling import DenseStep
from quire.compute.models.source import ModelSource
from quire.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Dense:
    """weight @ vector + bias, then perhaps a tanh. Sums run in numpy's own loops, so their order is fixed."""

    weight: FloatArray  # [out, in]
    bias: FloatArray | None
    has_tanh: bool

    def __call__(self, vector: FloatArray) -> FloatArray:
        """Return the vector after the layer.

        >>> Dense(np.array([[1, 1], [0, 2]], np.float32), np.array([1, 0], np.float32), False)(np.ones(2, np.float32))
        array([3., 2.], dtype=float32)
        """
        product: FloatArray = np.einsum("oi,i->o", self.weight, vector)
        product = product if self.bias is None else product + self.bias
        return np.tanh(product, dtype=np.float64).astype(np.float32) if self.has_tanh else product


def read_dense(steps: tuple[DenseStep, ...], source: ModelSource) -> Iterator[Dense]:
    """Read the layers after the pooling; raises `CheckpointError` if they do not match their settings."""
    for step in steps:
        tensors, stem = source.tensors_of(step.folder), f"{step.folder}.linear"
        stem = stem if f"{stem}.weight" in tensors.entries else "linear"
        shapes: dict[str, tuple[int, ...]] = {f"{stem}.weight": (step.num_outputs, step.num_inputs)}
        shapes |= {f"{stem}.bias": (step.num_outputs,)} if step.bias else {}
        read = list[FloatArray]()
        for name, shape in shapes.items():
            found = tensors.entries[name].shape if name in tensors.entries else None
            if found != shape:
                where = f"{tensors.name}: {tensors.stored_name(name)}: shape"
                raise CheckpointError(where, None if found is None else list(found), str(list(shape)))
            tensors.require_floats(name)
            read.append(np.ascontiguousarray(tensors.tensor(name)))
            if not np.isfinite(read[-1]).all():
                raise CheckpointError(f"{tensors.name}: {name}", "NaN or infinity", "finite numbers")
        yield Dense(read[0], read[1] if step.bias else None, step.has_tanh)
