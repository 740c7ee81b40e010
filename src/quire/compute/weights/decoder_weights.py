"""The weights of a decoder by the part they belong to, checked against its spec before any is used.

A checkpoint must hold exactly the tensors of the spec, each of its shape: a missing, an extra or a
wrong-shaped tensor means that the settings and the weights are of two models, and every one of them
is found before the first is mapped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from quire.compute.arrays import FloatArray
from quire.compute.models.base import DecoderSpec, Part, PartShape
from quire.compute.weights.checkpoint import Checkpoint
from quire.core.errors import CheckpointError

MAX_TENSORS_NAMED = 3


@dataclass(frozen=True, slots=True)
class PartWeights:
    """The weights of one part: a matrix `[out, in]` or a norm `[size]`, and its bias `[out]`."""

    weight: FloatArray
    bias: FloatArray | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a decoder: the parts that stand once, and those of each layer."""

    parts: Mapping[Part, PartWeights]
    layers: tuple[Mapping[Part, PartWeights], ...]

    @classmethod
    def load(cls, spec: DecoderSpec, checkpoint: Checkpoint) -> DecoderWeights:
        """Check the checkpoint against the spec, then take its tensors."""
        _check_tensors(spec, checkpoint)

        def take(parts: Mapping[Part, PartShape], layer: int) -> dict[Part, PartWeights]:
            return {
                part: _take_part(checkpoint, shape, spec.names[part].format(layer=layer))
                for part, shape in parts.items()
            }

        layers = tuple(take(spec.layer_parts(), layer) for layer in range(len(spec.layers)))
        return cls(take(spec.model_parts(), 0), layers)


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint of the spec holds."""
    expected: dict[str, tuple[int, ...]] = {}
    for part, shape in spec.model_parts().items():
        expected |= shape.tensors(spec.names[part])
    for layer in range(len(spec.layers)):
        for part, shape in spec.layer_parts().items():
            expected |= shape.tensors(spec.names[part].format(layer=layer))
    return expected


def _take_part(checkpoint: Checkpoint, shape: PartShape, stem: str) -> PartWeights:
    return PartWeights(*(checkpoint.tensor(name) for name in shape.tensors(stem)))


def _check_tensors(spec: DecoderSpec, checkpoint: Checkpoint) -> None:
    expected, found = expected_tensors(spec), checkpoint.entries
    missing = sorted(expected.keys() - found.keys())
    extra = sorted(found.keys() - expected.keys() - spec.ignored_tensors)
    wrong = [
        f"{name} {list(found[name].shape)} for {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name].shape != shape
    ]
    problems = {"missing": missing, "extra": extra, "wrong shape": wrong}
    said = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
    if said:
        where = f"{checkpoint.folder}: tensors ({'; '.join(said)})"
        raise CheckpointError(where, f"{len(found)} tensors", f"the {len(expected)} tensors of its config")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_TENSORS_NAMED])
    return shown + (f" and {len(names) - MAX_TENSORS_NAMED} more" if len(names) > MAX_TENSORS_NAMED else "")
