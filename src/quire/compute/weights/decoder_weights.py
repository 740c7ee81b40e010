"""The weights of a decoder by part, checked against its spec before use.

A checkpoint must have exactly the tensors of the spec, with their shapes. A missing, extra or wrong-shaped
tensor means that settings and weights are of two models. All such errors are found before the first tensor
is mapped. Parts that a checkpoint fuses in one tensor must fill it.

Matrices are float32, or bfloat16 as uint16; norms, biases and routers are always float32. A tensor that has this dtype
in the file and is not transposed becomes a view of the mapping, fused or not, unless its rows are reordered. Matrices
in products can also be codes (codes.py): computed directly from the numbers of the checkpoint, or kept as the blocks of
a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from quire.compute.arrays import FloatArray, WeightArray
from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import STREAM_INS, STREAM_OUTS, Part, PartShape, WeightSource
from quire.compute.weights.bfloat16 import narrowed, widened
from quire.compute.weights.codes import MADE, Codes, coded, coded_row_bytes
from quire.compute.weights.weight_file import EVERYTHING, WeightFile
from quire.core.errors import CheckpointError, InvariantError
from quire.core.executor import NoteLoaded

MAX_TENSORS_NAMED: Final = 3
NUMBER_BYTES: Final = {"float32": 4, "bfloat16": 2}
COMPACT_HEAD_BYTES: Final = 256  # for 256 inputs of 64 outputs
DTYPES: Final = ("float32", "bfloat16")
WEIGHTS: Final = ("auto", "widened", *MADE)
PRODUCTS: Final = frozenset(
    {Part.EMBEDDING_IN, Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT, Part.GATE, Part.UP, Part.DOWN}
    | {Part.EXPERT_GATE, Part.EXPERT_UP, Part.EXPERT_DOWN, Part.EMBEDDING_OUT, Part.HEAD}
    | {Part.QUERY_DOWN, Part.LATENT, Part.SHARED_GATE, Part.SHARED_UP, Part.SHARED_DOWN}
    | {Part.ATTENTION_GATE, Part.DELTA_QUERY, Part.DELTA_KEY, Part.DELTA_VALUE, Part.DELTA_GATE, Part.DELTA_OUTPUT}
    | {Part.MAMBA_GATE, Part.MAMBA_VALUE, Part.MAMBA_KEY, Part.MAMBA_QUERY, Part.MAMBA_OUTPUT}
    | {Part.CONVOLUTION_GATE, Part.CONVOLUTION_VALUE, Part.CONVOLUTION_OUTPUT_GATE, Part.CONVOLUTION_OUTPUT}
    | {Part.LAYER_INPUTS, Part.INPUT_GATE, Part.INPUT_OUTPUT, Part.LAUREL_IN, Part.LAUREL_OUT}
    | {*STREAM_INS, *STREAM_OUTS}
)
"""The matrices in products, except the router; an embedding that is also the head is another one."""

LOOKED_UP: Final = frozenset({Part.EMBEDDING, Part.LAYER_EMBEDDING})
"""Matrices whose rows are read by token; they stay blocks if they are blocks in the file."""

OF_LATENTS: Final = frozenset({Part.KEY_UP, Part.VALUE_UP})
"""Matrices that never become codes: queries are multiplied by the columns of KEY_UP."""

ROUTERS: Final = frozenset(
    {Part.ROUTER, Part.SHARED_ROUTER, Part.STREAM_ROUTER, Part.STREAM_PREDICT, Part.STREAM_CORRECT}
)
"""Matrices that weigh experts or streams. They are not rounded: a small change can send a token to other experts."""

NOT_MATRICES: Final = frozenset(
    {Part.DELTA_FILTER, Part.MAMBA_FILTER, Part.CONVOLUTION_FILTER, Part.DISTANCE_BIAS},
)
"""Weights with several dimensions that are always float32, because no product reads them."""

HEAD_NORMS: Final = frozenset({Part.QUERY_NORM, Part.KEY_NORM})
"""Norms on heads: their weights are one row, even if each head has its own."""

HEAD_PARTS: Final = frozenset({Part.EMBEDDING, Part.HEAD})
"""Parts with eight bits even with int4: every token's probability depends on them, and rounding hurts them most."""


@dataclass(frozen=True, slots=True)
class PartWeights:
    """The weights of one part: a matrix `[out, in]` or a norm `[size]`, and its bias `[out]`.

    `blocks`: the block type, if the matrix is the bytes of blocks; `codes`: the matrix as codes, with scales.
    `change`: the matrices A and B of an adapter, whose product is added to the matrix. `bounds`: the least and the
    highest input, then output.
    """

    weight: WeightArray
    bias: FloatArray | None = None
    blocks: str = ""
    codes: Codes | None = None
    change: tuple[FloatArray, FloatArray] | None = None
    bounds: tuple[float, ...] | None = None


Parts = Mapping[Part, PartWeights]


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The weights of a decoder: the parts outside of layers, and the parts of each layer.

    `experts[layer][expert]` has the parts of an expert; it is empty for a layer that is not sparse.
    """

    parts: Parts
    layers: tuple[Parts, ...]
    experts: tuple[tuple[Parts, ...], ...] = ()

    @classmethod
    def load(
        cls, spec: DecoderSpec, checkpoint: WeightFile, dtype: str = "float32", weights: str = "auto"
    ) -> DecoderWeights:
        """Check the checkpoint against the spec, then read its tensors, matrices in `dtype` or as codes."""
        reader = WeightReader(spec, checkpoint, dtype, weights)

        def taken(parts: Parts) -> Parts:
            return {
                part: _coded(piece, kind) if (kind := reader.codes_of(part)) else piece for part, piece in parts.items()
            }

        layers = tuple(taken(reader.layer(index)) for index in range(len(spec.layers)))
        experts = tuple(tuple(map(taken, reader.experts(index))) for index in range(len(spec.layers)))
        return cls(taken(reader.model()), layers, experts)


def _coded(part: PartWeights, kind: str) -> PartWeights:
    weight = widened(part.weight) if part.weight.dtype == np.uint16 else part.weight
    codes = coded(weight, kind)
    return PartWeights(codes.codes, part.bias, codes=codes)


def weight_bytes(
    spec: DecoderSpec,
    dtype: str = "float32",
    weights: str = "auto",
    block_types: Mapping[str, str] = MappingProxyType({}),
    *,
    compact: bool = False,
) -> int:
    """Return the bytes of a model's weights in memory, counting one of equal layers and experts if none has blocks.

    If the checkpoint has `dtype` it is mapped, and these bytes are pages of its files. `block_types` are the
    checkpoint's, for weights that stay as they are stored. `compact`: matrices of bfloat16 take 12 bits a number.
    """
    _check_numbers(dtype, weights)
    of = _Stored(dtype, weights, block_types, compact and dtype == "bfloat16")
    num_bytes = sum(place.num_bytes(of) for place in _model_places(spec))
    can_differ = bool(block_types) and weights == "auto"  # layers and experts, in the types of their blocks
    alike: dict[object, list[int]] = {}
    for layer, kind in enumerate(spec.layers):
        alike.setdefault(layer if can_differ else kind, []).append(layer)
    for layer, *others in alike.values():
        of_layer = sum(place.num_bytes(of) for place in _layer_places(spec, layer))
        count = _num_experts(spec, layer)
        num_counted = count if can_differ else min(count, 1)
        for expert in range(num_counted):
            of_expert = sum(place.num_bytes(of) for place in _expert_places(spec, layer, expert))
            of_layer += count // num_counted * of_expert
        num_bytes += (1 + len(others)) * of_layer
    return num_bytes


def compact_bytes(num_outputs: int, num_inputs: int) -> int:
    """Return the bytes of a matrix of bfloat16 on the CPU, which is compact if that takes less memory.

    See native/src/kernels/compact.h; if some numbers do not fit, the matrix takes all 16 bits of each.

    >>> compact_bytes(1024, 1024) / (1024 * 1024)  # bytes of a number
    1.515625
    >>> compact_bytes(16, 16)
    512
    """
    groups, chunks = -(-num_outputs // 64), -(-num_inputs // 256)
    compact = groups * (chunks * COMPACT_HEAD_BYTES + 64 * 3 // 2 * num_inputs)
    return min(compact, num_outputs * num_inputs * NUMBER_BYTES["bfloat16"])


def is_product(spec: DecoderSpec, part: Part) -> bool:
    """Return whether a part is a matrix in products, except the router: only such parts become codes."""
    return part in PRODUCTS or (part is Part.EMBEDDING and spec.tied_head)


def is_matrix(part: Part, shape: PartShape) -> bool:
    """Return whether a weight has the dtype of matrices; norms and routers are always float32."""
    return len(shape.weight) > 1 and part not in ROUTERS | HEAD_NORMS | NOT_MATRICES


def kept_type(spec: DecoderSpec, part: Part, shape: PartShape, block_types: Mapping[str, str], layer: int) -> str:
    """Return the block type that a part of a layer keeps with weights "auto"; empty if it does not stay blocks."""
    return _Place.of(spec, part, shape, layer).kept_blocks(_Stored("bfloat16", "auto", block_types))


def expected_tensors(spec: DecoderSpec) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of a checkpoint of the spec."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    tensors: dict[str, tuple[int, ...]] = {}
    for place in _places(spec):
        tensors |= dict.fromkeys(place.numbers, ())
        if not place.stem:
            continue
        if "{head}" in place.stem:
            tensors |= dict.fromkeys(place.head_names(), place.shape.weight[1:])
            continue
        first, rest = place.source.first_row, place.shape.weight[1:]
        rows = place.shape.weight[0] // place.source.repeats
        run = place.source.run or rows
        ranges.setdefault(place.stem, []).append((first, first + run))
        total = max(stop for _, stop in ranges[place.stem]) * (rows // run)
        tensors[f"{place.stem}.weight"] = (*rest, total) if place.source.transposed else (total, *rest)
        if place.shape.bias:
            tensors[f"{place.stem}.bias"] = (total,)
        tensors |= dict.fromkeys(place.bounds, ())
        if place.factors:
            tensors[place.factors] = (place.shape.weight[0],)
    for stem, parts in ranges.items():
        if not _fills(sorted(set(parts))):  # a pair of layers can share a norm
            raise InvariantError(f"{stem}: the rows of its parts do not fill it: {sorted(parts)}")
    return tensors


@dataclass(frozen=True, slots=True)
class _Stored:
    """The types of a model's weights in memory."""

    dtype: str
    weights: str
    block_types: Mapping[str, str]
    compact: bool = False

    def codes_of(self, part: Part) -> str:
        """Return the kind of codes that a matrix becomes; empty if it stays numbers."""
        if self.weights not in MADE:
            return ""
        return "int8_groups" if self.weights == "int4" and part in HEAD_PARTS else self.weights


@dataclass(frozen=True, slots=True)
class _Place:
    """One part of one layer or expert, and its place in the checkpoint."""

    part: Part
    shape: PartShape
    source: WeightSource
    stem: str
    is_product: bool
    bounds: tuple[str, ...]
    factors: str
    numbers: tuple[str, ...]
    values: tuple[float, ...]

    @classmethod
    def of(cls, spec: DecoderSpec, part: Part, shape: PartShape, layer: int = 0, expert: int = 0) -> _Place:
        """Return the place of a part."""
        source = spec.sources[part]
        stem, bounds, factors = source.stem_of(layer, expert), tuple(source.bounds_of(layer)), source.factors_of(layer)
        numbers = tuple(name.format(layer=layer) for name in source.numbers)
        values = source.values[layer] if source.values else ()
        return cls(part, shape, source, stem, is_product(spec, part), bounds, factors, numbers, values)

    def dtype(self, matrices: str) -> str:
        """Return the dtype of the weight if matrices have the given one.

        A small change can send a token to other experts, so the router is not rounded; neither are norms.
        """
        return matrices if is_matrix(self.part, self.shape) else "float32"

    def kept_blocks(self, of: _Stored) -> str:
        """Return the block type that the weight keeps; empty if it does not stay blocks."""
        is_changed = self.source.factor != 1 or bool(self.factors)
        if of.weights != "auto" or is_changed or not (self.is_product or self.part in LOOKED_UP):
            return ""
        return of.block_types.get(f"{self.stem}.weight", "")

    def num_bytes(self, of: _Stored) -> int:
        """Return the bytes of the weight and its bias."""
        rows, bias = self.shape.weight[0], self.shape.weight[0] * self.shape.bias * NUMBER_BYTES["float32"]
        codes = (of.codes_of(self.part) if self.is_product else "") or self.kept_blocks(of)
        if codes:
            return rows * coded_row_bytes(codes, self.shape.weight[1]) + bias
        if of.compact and self.is_product:
            return compact_bytes(rows, math.prod(self.shape.weight[1:])) + bias
        return math.prod(self.shape.weight) * NUMBER_BYTES[self.dtype(of.dtype)] + bias

    def head_names(self) -> list[str]:
        """Return the names of the tensors of a norm on heads: one per head, or one for all."""
        heads = range(self.shape.weight[0] if "{head}" in self.stem else 1)
        return [f"{self.stem.replace('{head}', str(head))}.weight" for head in heads]

    @property
    def rows(self) -> slice | list[int]:
        """The rows of the tensor that belong to this part; for a norm on heads, the elements."""
        is_row = self.part in HEAD_NORMS
        return self.source.rows_of(math.prod(self.shape.weight) if is_row else self.shape.weight[0])


def _places(spec: DecoderSpec) -> Iterator[_Place]:
    """Yield every part of the model, layer by layer."""
    yield from _model_places(spec)
    for layer in range(len(spec.layers)):
        yield from _layer_places(spec, layer)
        for expert in range(_num_experts(spec, layer)):
            yield from _expert_places(spec, layer, expert)


def _model_places(spec: DecoderSpec) -> Iterator[_Place]:
    """Yield the parts outside of layers."""
    for part, shape in spec.model_parts().items():
        yield _Place.of(spec, part, shape)


def _layer_places(spec: DecoderSpec, layer: int) -> Iterator[_Place]:
    """Yield the parts of one layer, without those of its experts."""
    for part, shape in spec.layer_parts(spec.layers[layer]).items():
        yield _Place.of(spec, part, shape, layer)


def _expert_places(spec: DecoderSpec, layer: int, expert: int) -> Iterator[_Place]:
    """Yield the parts of one expert."""
    for part, shape in spec.expert_parts().items():
        yield _Place.of(spec, part, shape, layer, expert)


def _num_experts(spec: DecoderSpec, layer: int) -> int:
    return spec.experts.num_experts if spec.experts is not None and spec.layers[layer].sparse else 0


def _fills(ranges: list[tuple[int, int]]) -> bool:
    """Return whether sorted ranges are contiguous from 0 on."""
    return all(start == end for (start, _), end in zip(ranges, [0, *(stop for _, stop in ranges)], strict=False))


def _check_numbers(dtype: str, weights: str) -> None:
    for name, value, allowed in (("dtype", dtype, DTYPES), ("weights", weights, WEIGHTS)):
        if value not in allowed:
            raise CheckpointError(name, value, f"one of {', '.join(allowed)}")


class WeightReader:
    """Reads the parts of a spec from a checkpoint, which it checks first. Matrices have `dtype`.

    Matrices that will be codes have the dtype of the checkpoint, bfloat16 or float32. With weights "auto", the matrices
    in `block_types` stay bytes of blocks. Parts count as loaded when the next parts are read, or on `release`: a
    view of a file is read only when it is used.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        checkpoint: WeightFile,
        dtype: str,
        weights: str = "auto",
        note_loaded: NoteLoaded | None = None,
        *,
        block_types: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        _check_numbers(dtype, weights)
        self._note_loaded = note_loaded
        self._stored = _Stored(dtype, weights, block_types if weights == "auto" else {})
        self._taken_bytes, self._total_bytes = 0, weight_bytes(spec, dtype, weights, self._stored.block_types)
        self._spec = spec
        self._checkpoint = checkpoint
        self.dtype = dtype
        # No name in a checkpoint of the bare decoder has the prefix.
        prefixed = any(name.startswith(spec.optional_prefix) for name in checkpoint.entries)
        self._absent_prefix = "" if prefixed else spec.optional_prefix
        self._check()

    def model(self) -> Parts:
        """Return the parts outside of layers."""
        return self._take_all(self._spec.model_parts())

    def layer(self, index: int) -> Parts:
        """Return the parts of a layer, without those of its experts."""
        return self._take_all(self._spec.layer_parts(self._spec.layers[index]), index)

    def experts(self, layer: int) -> Iterator[Parts]:
        """Yield the parts of each expert of a layer; nothing if the layer is not sparse."""
        for expert in range(_num_experts(self._spec, layer)):
            yield self._take_all(self._spec.expert_parts(), layer, expert)

    def codes_of(self, part: Part) -> str:
        """Return the kind of codes in `MADE` that a part will become; empty for other parts."""
        return self._stored.codes_of(part) if is_product(self._spec, part) else ""

    def release(self) -> None:
        """Free the memory of mapped files; views of them are read again when used."""
        self._checkpoint.release()
        self._note()

    def _take_all(self, parts: Mapping[Part, PartShape], layer: int = 0, expert: int = 0) -> dict[Part, PartWeights]:
        self._note()
        places = [_Place.of(self._spec, part, shape, layer, expert) for part, shape in parts.items()]
        self._taken_bytes += sum(place.num_bytes(self._stored) for place in places)
        return {place.part: self._take(place) for place in places}

    def _note(self) -> None:
        if self._note_loaded is not None:
            self._note_loaded(self._taken_bytes, self._total_bytes, "weights")

    def _take(self, place: _Place) -> PartWeights:
        if not place.stem:
            numbers = [self._checkpoint.tensor(self._named(name)).item() for name in place.numbers] or place.values
            return PartWeights(np.array(numbers or np.ones(place.shape.weight), np.float32))
        name = self._named(f"{place.stem}.weight")
        rows = self._rows(name, place)
        if blocks := place.kept_blocks(self._stored):
            rows = place.rows if place.source.transposed else rows
            weight: WeightArray = _picked(lambda some: self._checkpoint.block_rows(name, some), rows)
        elif place.source.transposed:
            weight = np.ascontiguousarray(self._read(name, place)[:, place.rows].T)
            weight.flags.writeable = False
        elif place.part in HEAD_NORMS:
            each = [self._checkpoint.tensor(self._named(one)).reshape(-1) for one in place.head_names()]
            weight = _picked(lambda some: np.concatenate(each)[some], rows)
        else:
            weight = _picked(lambda some: self._read(name, place, some), rows)
        factors = self._factors(place)
        weight = _multiplied(weight, factors)
        if not place.shape.bias:
            return PartWeights(weight, blocks=blocks, bounds=self._bounds(place))
        name = self._named(f"{place.stem}.bias")
        bias = _picked(lambda some: self._checkpoint.tensor(name, some), self._rows(name, place))
        return PartWeights(weight, _multiplied(bias, factors), blocks, bounds=self._bounds(place))

    def _factors(self, place: _Place) -> FloatArray:
        """Return the factor of each row, or one for all."""
        factor = np.float32(place.source.factor)
        return self._checkpoint.tensor(self._named(place.factors)) * factor if place.factors else np.array(factor)

    def _bounds(self, place: _Place) -> tuple[float, ...] | None:
        """Return the bounds of a matrix; raises `CheckpointError` unless they are in order."""
        if not place.bounds:
            return None
        bounds = tuple(float(self._checkpoint.tensor(self._named(name)).item()) for name in place.bounds)
        if not bounds[0] <= bounds[1] or not bounds[2] <= bounds[3]:
            names = ", ".join(map(self._checkpoint.stored_name, place.bounds))
            where, allowed = f"{self._checkpoint.name}: tensors {names}", "the least and the highest input, then output"
            raise CheckpointError(where, bounds, allowed)
        return bounds

    def _read(self, name: str, place: _Place, rows: slice = EVERYTHING) -> WeightArray:
        half = place.dtype(self.dtype) == "bfloat16"
        if self.codes_of(place.part):
            half = self._checkpoint.entries[name].dtype == "BF16"
        return self._checkpoint.bfloat16_bits(name, rows) if half else self._checkpoint.tensor(name, rows)

    def _rows(self, name: str, place: _Place) -> slice | list[int]:
        rows = place.rows
        if isinstance(rows, list) or place.part in HEAD_NORMS:
            return rows
        return rows if self._checkpoint.entries[name].shape[0] != place.shape.weight[0] else EVERYTHING

    def _named(self, name: str) -> str:
        return name.removeprefix(self._absent_prefix)

    def _check(self) -> None:
        """Raise unless the checkpoint has exactly the tensors of the spec, with their shapes."""
        found = self._checkpoint.entries
        num_experts = sum(_num_experts(self._spec, layer) for layer in range(len(self._spec.layers)))
        if num_experts > len(found):  # a small file can claim many experts, and each becomes three names here
            where = f"{self._checkpoint.name}: number of experts"
            raise CheckpointError(where, num_experts, f"at most {len(found)}, the number of its tensors")
        expected = {self._named(name): shape for name, shape in expected_tensors(self._spec).items()}
        ignored = {self._named(name) for name in self._spec.ignored_tensors}
        missing = sorted(expected.keys() - found.keys())
        prefixes = self._spec.ignored_prefixes
        extra = sorted(name for name in found.keys() - expected.keys() - ignored if not name.startswith(prefixes))
        stored = self._checkpoint.stored_name
        wrong = [
            f"{stored(name)} {list(found[name].shape)} for {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name].shape not in (shape, shape or (1,))  # a number can be a vector of one
        ]
        problems = {"missing": [*map(stored, missing)], "extra": [*map(stored, extra)], "wrong shape": wrong}
        said = [f"{kind}: {_some([*dict.fromkeys(names)])}" for kind, names in problems.items() if names]
        if said:
            where = f"{self._checkpoint.name}: tensors ({'; '.join(said)})"
            raise CheckpointError(where, f"{len(found)} tensors", f"the {len(expected)} tensors of its config")
        for name in expected:
            self._checkpoint.require_floats(name)


def _picked(read: Callable[[slice], WeightArray], rows: slice | list[int]) -> WeightArray:
    """Return rows of a tensor: a slice as read, a list as a copy in that order."""
    if isinstance(rows, slice):
        return read(rows)
    picked: WeightArray = read(EVERYTHING)[rows]
    picked.flags.writeable = False
    return picked


def _multiplied(weight: WeightArray, factors: FloatArray) -> WeightArray:
    """Return the numbers multiplied by a factor, or each row by its own, in their dtype."""
    if not factors.ndim and factors == 1:
        return weight
    is_half = weight.dtype == np.uint16
    product = (widened(weight) if is_half else weight) * factors.reshape(-1, *[1] * (weight.ndim - 1))
    found: WeightArray = narrowed(product) if is_half else product
    found.flags.writeable = False
    return found


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_TENSORS_NAMED])
    return shown + (f" and {len(names) - MAX_TENSORS_NAMED} more" if len(names) > MAX_TENSORS_NAMED else "")
