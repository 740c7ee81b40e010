"""Shards: what one of several ranks holds of a model, always whole outputs of a matrix.

    query, key, value    the outputs of its heads          gate, up    its part of the outputs
    output, down, head   its part of the outputs           the rest    everything: embedding, norms

No sum is split: an output is one sum over all inputs, computed by one rank. So gathering the outputs of all ranks gives
what one rank would have computed, to the bit, if the library adds up in the same order for a narrower matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from quire.compute.models.base import DecoderSpec, Part
from quire.compute.torch.parallel.split import Rank
from quire.compute.torch.products import Matrix
from quire.compute.torch.weights import MLP, PartReader, TorchWeights
from quire.compute.weights.decoder_weights import Parts, PartWeights

SPLIT: Final = frozenset(
    {Part.QUERY, Part.KEY, Part.VALUE, Part.OUTPUT, Part.GATE, Part.UP, Part.DOWN, Part.HEAD, Part.SINKS}
)
"""Parts of which a rank has some of the outputs, or of the heads."""


class ShardedMatrix(Matrix):
    """Some of the outputs of a matrix; the products of all ranks are gathered. The rows are those of all ranks."""

    __slots__ = ()


class JoiningMatrix(ShardedMatrix):
    """The same, for rows of which each rank has its own part of the inputs, so that they are gathered first."""

    __slots__ = ()


class ShardReader:
    """Implements `PartReader`: the part of a rank of what another reader reads."""

    def __init__(self, reader: PartReader, rank: Rank) -> None:
        self._reader = reader
        self._rank = rank

    def model(self) -> Parts:
        """Return the parts outside of layers."""
        return self._split(self._reader.model())

    def layer(self, index: int) -> Parts:
        """Return the parts of a layer."""
        return self._split(self._reader.layer(index))

    def experts(self, layer: int) -> Iterator[Parts]:
        """There are none: `shard_of` refuses such models."""
        return self._reader.experts(layer)

    def codes_of(self, part: Part) -> str:
        """Return "int8" for a part that will be int8, else nothing."""
        return self._reader.codes_of(part)

    def release(self) -> None:
        """Free the memory of parts that were read."""
        self._reader.release()

    def _split(self, parts: Parts) -> Parts:
        split: Mapping[Part, PartWeights] = {
            name: self._shard(piece) if name in SPLIT else piece for name, piece in parts.items()
        }
        return MappingProxyType(dict(split))

    def _shard(self, piece: PartWeights) -> PartWeights:
        rows = self._rank.share_of(len(piece.weight))
        return replace(piece, weight=piece.weight[rows], bias=None if piece.bias is None else piece.bias[rows])


def marked(weights: TorchWeights, spec: DecoderSpec, rank: Rank) -> TorchWeights:
    """Return the weights of a rank with the matrices marked whose products are gathered. Does not mutate.

    A head that is also the embedding: its share of the rows.
    """
    head = weights.head
    if spec.tied_head:
        rows = rank.share_of(spec.vocab_size)
        bias, scales = (None if each is None else each[rows] for each in (head.bias, head.scales))
        head = Matrix(head.weight[rows], bias, scales)
    layers = tuple(
        replace(
            layer,
            output=_joining(layer.output),
            mlp=None if layer.mlp is None else MLP(layer.mlp.up, _joining(layer.mlp.down)),
        )
        for layer in weights.layers
    )
    return replace(weights, head=ShardedMatrix(head.weight, head.bias, head.scales), layers=layers)


def _joining(matrix: Matrix) -> JoiningMatrix:
    return JoiningMatrix(matrix.weight, matrix.bias, matrix.scales)
