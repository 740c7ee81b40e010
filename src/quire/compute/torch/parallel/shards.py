"""Shards: the part of a model that one of several ranks holds. By default, matrices are split by outputs.

    query, key, value        the outputs of its heads        gate, up, also of experts    its part of the outputs
    output, down, head       its part of the outputs         the rest                     everything

No sum is split: an output is one sum over all inputs, computed by one rank. So the gathered outputs of all ranks have
the bits that one rank would have computed, if the library adds up in the same order for a narrower matrix.

With `tensor_parallel_sums` "reduce", the matrices `output` and `down` are split by inputs instead, and ranks add up
their products: half as many exchanges, and other bits for another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from quire.compute.models.base import DecoderSpec
from quire.compute.models.parts import NormScope, Part
from quire.compute.torch.parallel.split import Rank, splits_head
from quire.compute.torch.products import Matrix
from quire.compute.torch.weights import MLP, PartReader, TorchWeights
from quire.compute.weights.decoder_weights import Parts, PartWeights

OF_KEYS: Final = frozenset({Part.KEY, Part.VALUE})
"""Parts of key-value heads, which can be fewer than the ranks."""
ENDS: Final = frozenset({Part.OUTPUT, Part.DOWN, Part.EXPERT_DOWN, Part.SHARED_DOWN})
"""The last matrices of sublayers, which read the outputs of all ranks."""
SPLIT: Final = (
    frozenset({Part.QUERY, Part.GATE, Part.UP, Part.EXPERT_GATE, Part.EXPERT_UP, Part.HEAD, Part.SINKS})
    | {Part.SHARED_GATE, Part.SHARED_UP}
    | OF_KEYS
    | ENDS
)
"""Parts that are split among ranks, by outputs or by heads."""


class ShardedMatrix(Matrix):
    """Some of the outputs of a matrix; the products of all ranks are gathered. All ranks have the same rows."""

    __slots__ = ()


class JoiningMatrix(ShardedMatrix):
    """A sharded matrix for rows of which each rank has some of the inputs: the rows are gathered first."""

    __slots__ = ()


class PartialMatrix(Matrix):
    """Some of the inputs of a matrix, for rows that have only these inputs; the ranks' products are added up."""

    __slots__ = ()


class ShardReader:
    """Reads a rank's share of another reader's parts; implements `PartReader`. `sums`: split `ENDS` by inputs."""

    def __init__(self, reader: PartReader, spec: DecoderSpec, rank: Rank, *, sums: bool = False) -> None:
        self._reader = reader
        self._rank = rank
        self._num_kv_heads = [spec.attention_of(layer).num_kv_heads for layer in spec.layers]
        self._split_parts = SPLIT if splits_head(spec, rank.count) else SPLIT - {Part.HEAD}
        if spec.attention.qk_norm_scope is NormScope.EACH_HEAD:
            self._split_parts |= {Part.QUERY_NORM, Part.KEY_NORM}
        self._summed = ENDS if sums else frozenset()

    def model(self) -> Parts:
        """Return the parts outside of layers."""
        return self._split(self._reader.model())

    def layer(self, index: int) -> Parts:
        """Return the parts of a layer."""
        of_keys = self._rank.among(min(self._rank.count, self._num_kv_heads[index]))
        return self._split(self._reader.layer(index), of_keys)

    def experts(self, layer: int) -> Iterator[Parts]:
        """Yield the parts of each expert of a layer."""
        return map(self._split, self._reader.experts(layer))

    def codes_of(self, part: Part) -> str:
        """Return "int8" for a part that will be int8, else ""."""
        return self._reader.codes_of(part)

    def release(self) -> None:
        """Free the memory of parts that were read."""
        self._reader.release()

    def _split(self, parts: Parts, of_keys: Rank | None = None) -> Parts:
        return {
            name: self._shard(name, piece, of_keys or self._rank) if name in self._split_parts else piece
            for name, piece in parts.items()
        }

    def _shard(self, name: Part, piece: PartWeights, of_keys: Rank) -> PartWeights:
        if name in self._summed:
            columns = self._rank.share_of(piece.weight.shape[1])
            return replace(piece, weight=piece.weight[:, columns], bias=piece.bias if self._rank.number == 0 else None)
        rank = of_keys if name in OF_KEYS or name is Part.KEY_NORM else self._rank
        rows = rank.share_of(len(piece.weight))
        return replace(piece, weight=piece.weight[rows], bias=None if piece.bias is None else piece.bias[rows])


def marked(weights: TorchWeights, spec: DecoderSpec, rank: Rank, *, sums: bool = False) -> TorchWeights:
    """Return the weights of a rank; the class of a matrix marks how its products are exchanged. Does not mutate.

    A head that is also the embedding becomes the rank's share of its rows.
    """
    head, end = weights.head, PartialMatrix if sums else JoiningMatrix
    if splits_head(spec, rank.count):
        rows = rank.share_of(spec.vocab_size) if spec.tied_head else slice(None)
        head = _as(ShardedMatrix, head.changed(lambda each: each[rows]))

    def marked_mlp(mlp: MLP | None) -> MLP | None:
        return None if mlp is None else replace(mlp, down=_as(end, mlp.down))

    layers = tuple(
        replace(layer, output=_as(end, layer.output), mlp=marked_mlp(layer.mlp), experts=marked_mlp(layer.experts))
        for layer in weights.layers
    )
    return replace(weights, head=head, layers=layers)


def _as(kind: type[Matrix], matrix: Matrix) -> Matrix:
    return kind(matrix.weight, matrix.bias, matrix.scales)
