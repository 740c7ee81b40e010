"""The weights of a decoder by the part they belong to, checked against its spec before any is used.

A checkpoint must hold exactly the tensors of the spec, each of its shape: a missing, an extra or a
wrong-shaped tensor means that the settings and the weights are of two models, and every one of them
is found before the first is mapped. Parts that a checkpoint keeps in one fused tensor must fill it.

Matrices are float32, or bfloat16 as uint16; norms, biases and routers are float32 always. What the file
holds in the same dtype and not transposed is a view of the mapping, fused or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray, WeightArray
from quire.compute.models.base import DecoderSpec, Part, PartShape, WeightSource
from quire.compute.weights.checkpoint import EVERYTHING, Checkpoint
from quire.core.errors import CheckpointError, InvariantError
from quire.core.executor import NoteLoaded

MAX_TENSORS_NAMED: Final = 3
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PartWeights:
    """The weights of one part: a matrix `[out, in]` or a norm `[size]`, and its bias `[out]`."""

    weight: WeightArray
    bias: FloatArray | None = None


Parts = Mapping[Part, PartWeights]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a decoder: the parts that stand once, and those of each layer.

    `experts[layer][expert]` are the parts of an expert; a layer that is not sparse has none.
    """

    parts: Parts
    layers: tuple[Parts, ...]
    experts: tuple[tuple[Parts, ...], ...] = ()

    @classmethod
    def load(cls, spec: DecoderSpec, checkpoint: Checkpoint, dtype: str = "float32") -> DecoderWeights:
        """Check the checkpoint against the spec, then take its tensors, matrices in `dtype`."""
        reader = WeightReader(spec, checkpoint, dtype)
        layers = tuple(reader.layer(index) for index in range(len(spec.layers)))
        experts = tuple(tuple(reader.experts(index)) for index in range(len(spec.layers)))
        return cls(reader.model(), layers, experts)


def weight_bytes(spec: DecoderSpec, dtype: str = "float32") -> int:
    """Return how many bytes the weights of a model take in memory; O(number of parts).

    A checkpoint that holds `dtype` is mapped: these bytes are then pages of its files.
    """
    _check_dtype(dtype)
    return sum(place.num_bytes(dtype) for place in _places(spec))


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint of the spec holds."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    tensors: dict[str, tuple[int, ...]] = {}
    for place in _places(spec):
        ranges.setdefault(place.stem, []).append((place.rows.start, place.rows.stop))
        total, rest = max(stop for _, stop in ranges[place.stem]), place.shape.weight[1:]
        tensors[f"{place.stem}.weight"] = (*rest, total) if place.source.transposed else (total, *rest)
        if place.shape.bias:
            tensors[f"{place.stem}.bias"] = (total,)
    for stem, parts in ranges.items():
        if not _fills(sorted(parts)):
            raise InvariantError(f"{stem}: the rows of its parts do not fill it: {sorted(parts)}")
    return tensors


@dataclass(frozen=True, slots=True)
class _Place:
    """One part of one layer or expert, and where it lies."""

    part: Part
    shape: PartShape
    source: WeightSource
    stem: str

    @classmethod
    def of(cls, spec: DecoderSpec, part: Part, shape: PartShape, layer: int = 0, expert: int = 0) -> _Place:
        """Return the place of a part."""
        source = spec.sources[part]
        return cls(part, shape, source, source.stem_of(layer, expert))

    def dtype(self, matrices: str) -> str:
        """Return the dtype of the weight, where matrices have the one given.

        Which experts a token goes to changes by leaps, so the matrix that decides it is not rounded, as no norm is.
        """
        is_matrix = len(self.shape.weight) > 1 and self.part is not Part.ROUTER
        return matrices if is_matrix else "float32"

    def num_bytes(self, matrices: str) -> int:
        """Return the bytes of the weight and its bias."""
        weight = math.prod(self.shape.weight) * NUMBER_BYTES[self.dtype(matrices)]
        return weight + (self.shape.weight[0] * NUMBER_BYTES["float32"] if self.shape.bias else 0)

    @property
    def rows(self) -> slice:
        """The rows of the tensor that are this part's."""
        return slice(self.source.first_row, self.source.first_row + self.shape.weight[0])


def _places(spec: DecoderSpec) -> Iterator[_Place]:
    """Yield every part of the model."""
    for part, shape in spec.model_parts().items():
        yield _Place.of(spec, part, shape)
    for index, layer in enumerate(spec.layers):
        for part, shape in spec.layer_parts(layer).items():
            yield _Place.of(spec, part, shape, index)
        for expert in range(_num_experts(spec, index)):
            for part, shape in spec.expert_parts().items():
                yield _Place.of(spec, part, shape, index, expert)


def _num_experts(spec: DecoderSpec, layer: int) -> int:
    return spec.experts.num_experts if spec.experts is not None and spec.layers[layer].sparse else 0


def _fills(ranges: list[tuple[int, int]]) -> bool:
    """Return whether ranges, in order, follow one another from 0 on."""
    return all(start == end for (start, _), end in zip(ranges, [0, *(stop for _, stop in ranges)], strict=False))


def _check_dtype(dtype: str) -> None:
    if dtype not in NUMBER_BYTES:
        raise CheckpointError("dtype", dtype, f"one of {', '.join(NUMBER_BYTES)}")


class WeightReader:
    """Takes the parts of a spec out of a checkpoint, which is checked first. Matrices are of `dtype`.

    What was taken counts as loaded when the next parts are asked for, or it is let go of: a view of a file is only read
    by whoever uses it.
    """

    def __init__(
        self, spec: DecoderSpec, checkpoint: Checkpoint, dtype: str, note_loaded: NoteLoaded | None = None
    ) -> None:
        _check_dtype(dtype)
        self._note_loaded = note_loaded
        self._taken_bytes, self._total_bytes = 0, weight_bytes(spec, dtype)
        self._spec = spec
        self._checkpoint = checkpoint
        self._dtype = dtype
        # A checkpoint of the bare decoder has the prefix in none of its names.
        prefixed = any(name.startswith(spec.optional_prefix) for name in checkpoint.entries)
        self._absent_prefix = "" if prefixed else spec.optional_prefix
        self._check()

    def model(self) -> Parts:
        """Return the parts that stand once."""
        return self._take_all(self._spec.model_parts())

    def layer(self, index: int) -> Parts:
        """Return the parts of a layer, its experts aside."""
        return self._take_all(self._spec.layer_parts(self._spec.layers[index]), index)

    def experts(self, layer: int) -> Iterator[Parts]:
        """Yield the parts of each expert of a layer; of one that is not sparse, nothing."""
        for expert in range(_num_experts(self._spec, layer)):
            yield self._take_all(self._spec.expert_parts(), layer, expert)

    def release(self) -> None:
        """Let go of the memory that mapped files take up; what is a view of them is read again when it is used."""
        self._checkpoint.release()
        self._note()

    def _take_all(self, parts: Mapping[Part, PartShape], layer: int = 0, expert: int = 0) -> dict[Part, PartWeights]:
        self._note()
        places = [_Place.of(self._spec, part, shape, layer, expert) for part, shape in parts.items()]
        self._taken_bytes += sum(place.num_bytes(self._dtype) for place in places)
        return {place.part: self._take(place) for place in places}

    def _note(self) -> None:
        if self._note_loaded is not None:
            self._note_loaded(self._taken_bytes, self._total_bytes)

    def _take(self, place: _Place) -> PartWeights:
        name = self._named(f"{place.stem}.weight")
        if place.source.transposed:
            weight = np.ascontiguousarray(self._read(name, place)[:, place.rows].T)
            weight.flags.writeable = False
        else:
            weight = self._read(name, place, self._rows(name, place))
        if not place.shape.bias:
            return PartWeights(weight)
        name = self._named(f"{place.stem}.bias")
        return PartWeights(weight, self._checkpoint.tensor(name, self._rows(name, place)))

    def _read(self, name: str, place: _Place, rows: slice = EVERYTHING) -> WeightArray:
        half = place.dtype(self._dtype) == "bfloat16"
        return self._checkpoint.bfloat16_bits(name, rows) if half else self._checkpoint.tensor(name, rows)

    def _rows(self, name: str, place: _Place) -> slice:
        fused = self._checkpoint.entries[name].shape[0] != place.shape.weight[0]
        return place.rows if fused else EVERYTHING

    def _named(self, name: str) -> str:
        return name.removeprefix(self._absent_prefix)

    def _check(self) -> None:
        """Raise unless the checkpoint holds the tensors of the spec, all with their shapes."""
        found = self._checkpoint.entries
        expected = {self._named(name): shape for name, shape in expected_tensors(self._spec).items()}
        ignored = {self._named(name) for name in self._spec.ignored_tensors}
        missing = sorted(expected.keys() - found.keys())
        extra = sorted(found.keys() - expected.keys() - ignored)
        wrong = [
            f"{name} {list(found[name].shape)} for {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name].shape != shape
        ]
        problems = {"missing": missing, "extra": extra, "wrong shape": wrong}
        said = [f"{kind}: {_some(names)}" for kind, names in problems.items() if names]
        if said:
            where = f"{self._checkpoint.folder}: tensors ({'; '.join(said)})"
            raise CheckpointError(where, f"{len(found)} tensors", f"the {len(expected)} tensors of its config")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_TENSORS_NAMED])
    return shown + (f" and {len(names) - MAX_TENSORS_NAMED} more" if len(names) > MAX_TENSORS_NAMED else "")
