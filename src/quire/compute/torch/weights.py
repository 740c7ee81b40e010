"""The weights of a decoder on a device: read one tensor at a time, and fused if one product can replace several.

    query, key, value ─► one matrix      gate, up ─► one matrix      an offset of a norm's scale ─► added to it

Each fused matrix, and the experts of a layer together, are allocated at full size and filled part by part, so the host
never holds more than the tensor that it is reading. bfloat16 is read as uint16 and becomes a tensor by a view; int8 is
made on the device, directly from the numbers of the checkpoint, and so are codes from blocks. Norms and routers are
always float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional

from quire.compute.arrays import FloatArray, WeightArray
from quire.compute.models.base import DecoderSpec, LayerSpec
from quire.compute.models.parts import NormKind, NormScope, NormSpec, Part
from quire.compute.models.sublayers import AttentionSpec
from quire.compute.torch.blocks import coded
from quire.compute.torch.operations import HeadForm, Norm
from quire.compute.torch.products import Bounds, InputScales, Matrix
from quire.compute.torch.quantize import quantized
from quire.compute.weights.decoder_weights import Parts, PartWeights

DTYPES: Final = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})
DENSE: Final = (Part.GATE, Part.UP, Part.DOWN)
SHARED: Final = (Part.SHARED_GATE, Part.SHARED_UP, Part.SHARED_DOWN)
ROUTERS: Final = (Part.ROUTER, Part.SHARED_ROUTER)
LAYER_NORMS: Final = (
    Part.ATTENTION_NORM,
    Part.AFTER_ATTENTION_NORM,
    Part.JOINED_ATTENTION_NORM,
    Part.MLP_NORM,
    Part.AFTER_MLP_NORM,
    Part.JOINED_MLP_NORM,
    Part.AFTER_INPUT_NORM,
    Part.ROUTER_NORM,
    Part.EXPERTS_NORM,
    Part.AFTER_EXPERTS_NORM,
    Part.AFTER_SHARED_NORM,
)


class PartReader(Protocol):
    """The source of a model's parts: `quire.compute.weights.decoder_weights.WeightReader`, or made-up weights."""

    def model(self) -> Parts:
        """Return the parts outside of layers."""
        ...

    def layer(self, index: int) -> Parts:
        """Return the parts of a layer, without those of its experts."""
        ...

    def experts(self, layer: int) -> Iterator[Parts]:
        """Yield the parts of each expert of a layer."""
        ...

    def codes_of(self, part: Part) -> str:
        """Return "int8" for a part that will be int8, else ""."""
        ...

    def release(self) -> None:
        """Free the memory of parts that were read."""
        ...


@dataclass(frozen=True, slots=True)
class MLP:
    """down(activation(up)), of one MLP or all experts; `up` begins with the gate if the model's MLPs are gated.

    `xielu`: the numbers of that activation, float32 [4].
    """

    up: Matrix
    down: Matrix
    xielu: torch.Tensor | None = None


class Experts(NamedTuple):
    """A router, its stacked experts, the MLP next to them, and numbers that are added for the choice of experts.

    `factors`: multiply the weights of experts. `norms`: of the outputs of the experts and of the MLP.
    """

    router: Matrix
    experts: MLP
    shared: MLP | None = None
    offset: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    norms: Mapping[Part, Norm] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class InputWeights:
    """The weights of the inputs that layers have of their own; a row of `embedding` has those of all layers."""

    embedding: Matrix
    projection: Matrix
    norm: Norm


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer: an MLP, or a router and its stacked experts, perhaps with an MLP next to them.

    `input_gate`, `input_output`: the matrices before and after its own input. `scale`: multiplies the layer's output.
    """

    norms: Mapping[Part, Norm]
    form: HeadForm
    sinks: torch.Tensor | None  # float32 [num_heads]
    projection: Matrix  # query, key and value, as far as the layer has them
    output: Matrix
    mlp: MLP | None
    router: Matrix | None
    router_offset: torch.Tensor | None  # float32 [num_experts]
    factors: torch.Tensor | None  # float32 [num_experts]
    experts: MLP | None
    input_gate: Matrix | None = None
    input_output: Matrix | None = None
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class TorchWeights:
    """The weights of a decoder."""

    dtype: torch.dtype
    embedding: Matrix
    head: Matrix
    embedding_in: Matrix | None
    embedding_out: Matrix | None
    positions: torch.Tensor | None
    embedding_norm: Norm | None
    final_norm: Norm | None
    layer_inputs: InputWeights | None
    layers: tuple[LayerWeights, ...]
    token_norm: Norm | None = None
    state_norm: Norm | None = None

    @classmethod
    def load(cls, spec: DecoderSpec, reader: PartReader, dtype: torch.dtype, device: torch.device) -> TorchWeights:
        """Read all weights; rows will have `dtype`. Releases the reader's memory layer by layer."""
        loader = _Loader(spec, reader, dtype, device)
        parts = reader.model()
        nothing = torch.empty((0, spec.hidden_size), dtype=dtype, device=device)
        embedding = loader.fused((Part.EMBEDDING,), parts) if spec.vocab_size else Matrix(nothing)
        weights = cls(
            dtype=dtype,
            embedding=embedding,
            head=embedding if spec.tied_head else loader.fused((Part.HEAD,), parts),
            embedding_in=loader.matrix(Part.EMBEDDING_IN, parts),
            embedding_out=loader.matrix(Part.EMBEDDING_OUT, parts),
            positions=loader.fused((Part.POSITIONS,), parts).weight if Part.POSITIONS in parts else None,
            embedding_norm=loader.norm_of(Part.EMBEDDING_NORM, parts),
            final_norm=loader.norm_of(Part.FINAL_NORM, parts),
            layer_inputs=loader.inputs(parts),
            layers=(),
            token_norm=loader.norm_of(Part.TOKEN_NORM, parts),
            state_norm=loader.norm_of(Part.STATE_NORM, parts),
        )
        reader.release()
        return replace(weights, layers=tuple(loader.layer(index) for index in range(len(spec.layers))))

    def with_key_centres(self, centres: Mapping[int, FloatArray]) -> TorchWeights:
        """Return the same weights, with a centre for the keys of each layer, `[num_kv_heads, head_dim]`."""
        device = self.embedding.weight.device
        layers = list(self.layers)
        for index, centre in centres.items():
            moved = torch.from_numpy(centre).to(device, torch.float32)
            layers[index] = replace(layers[index], form=replace(layers[index].form, key_centre=moved))
        return replace(self, layers=tuple(layers))

    def matrices(self) -> Iterator[Matrix]:
        """Yield every matrix that rows are multiplied by; only the first expert of a layer, because all are alike."""
        if len(self.head.weight):
            yield self.head
        yield from filter(None, (self.embedding_in, self.embedding_out))
        if self.layer_inputs is not None:
            yield self.layer_inputs.projection
        for layer in self.layers:
            yield from filter(None, (layer.projection, layer.output, layer.router))
            yield from filter(None, (layer.input_gate, layer.input_output))
            if layer.mlp is not None:
                yield from (layer.mlp.up, layer.mlp.down)
            if layer.experts is not None:
                yield from (layer.experts.up.of(0), layer.experts.down.of(0))


class _Loader:
    """Moves parts to the device."""

    def __init__(self, spec: DecoderSpec, reader: PartReader, dtype: torch.dtype, device: torch.device) -> None:
        self._spec = spec
        self._reader = reader
        self._dtype = dtype
        self._device = device

    def layer(self, index: int) -> LayerWeights:
        """Return the weights of a layer. Mutates the reader, whose memory is released."""
        spec, parts = self._spec, self._reader.layer(index)
        heads = tuple(part for part in (Part.QUERY, Part.KEY, Part.VALUE) if part in parts)
        weights = LayerWeights(
            norms={part: self.norm(parts[part], spec.norm) for part in LAYER_NORMS if part in parts},
            form=self._head_form(spec.layers[index], parts),
            sinks=self._numbers(parts.get(Part.SINKS)),
            projection=self.fused(heads, parts),
            output=self.fused((Part.OUTPUT,), parts),
            mlp=self._mlp(parts),
            router_offset=self._numbers(parts.get(Part.ROUTER_OFFSET)),
            factors=self._numbers(parts.get(Part.EXPERT_FACTORS)),
            router=self._router(parts) if Part.ROUTER in parts else None,
            experts=self._experts(index) if Part.ROUTER in parts else None,
            input_gate=self.matrix(Part.INPUT_GATE, parts),
            input_output=self.matrix(Part.INPUT_OUTPUT, parts),
            scale=float(parts[Part.LAYER_SCALE].weight[0]) if Part.LAYER_SCALE in parts else 1.0,
        )
        self._reader.release()
        return weights

    def inputs(self, parts: Parts) -> InputWeights | None:
        """Return the weights of the inputs of layers; None: the model has none."""
        if Part.LAYER_INPUTS not in parts:
            return None
        return InputWeights(
            self.fused((Part.LAYER_EMBEDDING,), parts),
            self.fused((Part.LAYER_INPUTS,), parts),
            self.norm(parts[Part.LAYER_INPUTS_NORM], self._spec.norm),
        )

    def matrix(self, name: Part, parts: Parts) -> Matrix | None:
        """Return the matrix of a part; None: the model has none."""
        return self.fused((name,), parts) if name in parts else None

    def fused(self, names: tuple[Part, ...], parts: Parts) -> Matrix:
        """Return the matrices of some parts as one, rows of the first part first."""
        if parts[names[0]].blocks:
            return self._of_blocks(names, parts)
        matrix = self._room(names, parts)
        self._fill(matrix, names, parts)
        pieces = [(len(parts[name].weight), parts[name].bounds) for name in names]
        return replace(matrix, bounds=tuple(Bounds(count, bounds) for count, bounds in pieces if bounds is not None))

    def _of_blocks(self, names: tuple[Part, ...], parts: Parts) -> Matrix:
        """Return the blocks of some parts as one matrix of codes."""
        moved = (tensor_of(parts[name].weight).to(self._device) for name in names)
        pieces = [coded(parts[name].blocks, rows) for name, rows in zip(names, moved, strict=True)]
        biases = [self._moved(bias, self._dtype) for name in names if (bias := parts[name].bias) is not None]
        return Matrix(
            torch.cat([codes for codes, _ in pieces]),
            torch.cat(biases) if biases else None,
            inputs=InputScales.joined(inputs for _, inputs in pieces),
        )

    def _numbers(self, piece: PartWeights | None) -> torch.Tensor | None:
        """Return the numbers of a part that is no matrix; None: the layer has none."""
        return None if piece is None else self._moved(piece.weight, torch.float32)

    def _router(self, parts: Parts) -> Matrix:
        """Return the router; if the MLP next to the experts has a score, it is the last output."""
        bias = parts[Part.ROUTER].bias
        weight = torch.cat([self._moved(parts[part].weight, torch.float32) for part in ROUTERS if part in parts])
        if bias is None:
            return Matrix(weight)
        return Matrix(weight, functional.pad(self._moved(bias, torch.float32), (0, len(weight) - len(bias))))

    def _mlp(self, parts: Parts) -> MLP | None:
        """Return the MLP of all rows; in a layer with experts, the one next to them."""
        gate, up, down = DENSE if Part.UP in parts else SHARED
        if up not in parts:
            return None
        names = (gate, up) if self._spec.mlp.gated else (up,)
        return MLP(self.fused(names, parts), self.fused((down,), parts), self._numbers(parts.get(Part.XIELU)))

    def _experts(self, layer: int) -> MLP:
        """Return the experts of a layer, each in its place of one large matrix."""
        up_names = (Part.EXPERT_GATE, Part.EXPERT_UP) if self._spec.mlp.gated else (Part.EXPERT_UP,)
        down_names = (Part.EXPERT_DOWN,)
        assert self._spec.experts is not None  # only a model with experts has a router
        experts: MLP | None = None
        for expert, parts in enumerate(self._reader.experts(layer)):
            one = MLP(self.fused(up_names, parts), self.fused(down_names, parts))
            if experts is None:
                count = self._spec.experts.num_experts
                experts = MLP(*(matrix.changed(partial(_many, count)) for matrix in (one.up, one.down)))
            for matrix, given in ((experts.up, one.up), (experts.down, one.down)):
                for place, tensor in zip(matrix.of(expert).tensors(), given.tensors(), strict=True):
                    place.copy_(tensor)
        assert experts is not None
        return experts

    def _room(self, names: tuple[Part, ...], parts: Parts) -> Matrix:
        """Return room for the fused matrix of some parts. Either all of them have a bias, or none."""
        first = parts[names[0]]
        size = (sum(len(parts[name].weight) for name in names), *first.weight.shape[1:])
        bias = None if first.bias is None else torch.empty(size[:-1], dtype=self._dtype, device=self._device)
        if not self._reader.codes_of(names[0]):
            return Matrix(torch.empty(size, dtype=self._dtype, device=self._device), bias)
        scales = torch.empty(size[:-1], dtype=torch.float32, device=self._device)
        return Matrix(torch.empty(size, dtype=torch.int8, device=self._device), bias, scales)

    def _fill(self, matrix: Matrix, names: tuple[Part, ...], parts: Parts) -> None:
        """Copy the matrices of some parts, and their biases, into their room. Mutates the matrix."""
        start = 0
        for name in names:
            numbers, bias = tensor_of(parts[name].weight), parts[name].bias
            rows = slice(start, start + len(numbers))
            if matrix.bias is not None and bias is not None:
                matrix.bias[rows].copy_(tensor_of(bias))
            if matrix.scales is not None:
                matrix.weight[rows], matrix.scales[rows] = quantized(numbers.to(self._device), torch.int8)
            else:
                matrix.weight[rows].copy_(numbers)
            start = rows.stop

    def norm_of(self, name: Part, parts: Parts) -> Norm | None:
        """Return the norm of a part; None: the model has none."""
        return self.norm(parts[name], self._spec.norm) if name in parts else None

    def norm(self, piece: PartWeights, spec: NormSpec) -> Norm:
        """Return a norm."""
        weight = self._moved(piece.weight, torch.float32)
        bias = None if piece.bias is None else self._moved(piece.bias, torch.float32)
        return Norm(1 + weight if spec.unit_offset else weight, bias, spec.epsilon, spec.kind is NormKind.LAYER)

    def _head_form(self, layer: LayerSpec, parts: Parts) -> HeadForm:
        shape = self._spec.attention_of(layer)
        stores = layer.keys_of is None
        return HeadForm(
            shape.num_heads,
            shape.num_kv_heads if stores else 0,
            shape.head_dim,
            query_norm=self._head_norm(parts.get(Part.QUERY_NORM), shape),
            key_norm=self._head_norm(parts.get(Part.KEY_NORM), shape),
            value_norm=self._value_norm(shape) if shape.value_norm and stores else None,
            scope=shape.qk_norm_scope,
            rotates_first=shape.rotates_first,
            keys_are_values=layer.keys_are_values,
        )

    def _head_norm(self, piece: PartWeights | None, shape: AttentionSpec) -> Norm | None:
        if piece is None or shape.qk_norm is None:
            return None
        norm = self.norm(piece, shape.qk_norm)
        if shape.qk_norm_scope is not NormScope.EACH_HEAD:
            return norm
        return replace(norm, weight=norm.weight.view(-1, shape.head_dim))

    def _value_norm(self, shape: AttentionSpec) -> Norm | None:
        """Return the norm of values, which is like that of keys, without weights."""
        if shape.qk_norm is None:
            return None
        ones = PartWeights(np.ones(shape.head_dim, np.float32))
        return self.norm(ones, replace(shape.qk_norm, unit_offset=False))

    def _moved(self, array: WeightArray, dtype: torch.dtype) -> torch.Tensor:
        return tensor_of(array).to(self._device, dtype)


def _many(count: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return room for `count` tensors of this shape."""
    return tensor.new_empty((count, *tensor.shape))


def tensor_of(array: WeightArray) -> torch.Tensor:
    """Return a copy of an array as a tensor of the host; uint16 is bfloat16."""
    # A copy, because a tensor cannot be a view of read-only memory, as a mapped file is.
    copied = np.array(array, order="C")
    return torch.from_numpy(copied).view(torch.bfloat16) if array.dtype == np.uint16 else torch.from_numpy(copied)
