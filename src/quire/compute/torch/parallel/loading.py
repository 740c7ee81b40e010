"""Loads the shard of a rank: from the folder of a model to a decoder that computes some of its outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate
from typing import Final, NamedTuple

import torch

from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import TorchDecoder
from quire.compute.torch.load import (
    LoadedModel,
    create_attention,
    implementations_for,
    load_model,
    open_device,
    weight_reader,
    with_key_centres,
)
from quire.compute.torch.parallel.group import RankGroup, RanksExperts, RanksProduct
from quire.compute.torch.parallel.shards import ShardedMatrix, ShardReader, marked
from quire.compute.torch.parallel.split import FIELD, Rank, shard_of
from quire.compute.torch.products import Matrix, Product
from quire.compute.torch.settings import TorchSettings, block_spec
from quire.compute.torch.weights import DTYPES, TorchWeights
from quire.core.errors import InvalidConfigError, OutOfMemoryError
from quire.core.executor import NoteLoaded

NUM_ROWS: Final = 16


class Shard(NamedTuple):
    """A decoder of a rank's heads and outputs, and the KV memory of its heads.

    `draft`: the complete draft model, which only the first rank has.
    """

    decoder: TorchDecoder
    cache: TorchCache
    draft: LoadedModel | None


def load_shard(
    model: ModelDescription, settings: TorchSettings, group: RankGroup, note_loaded: NoteLoaded | None = None
) -> Shard:
    """Return the shard of a rank, once all ranks have theirs."""
    rank, sums = group.rank, settings.tensor_parallel_sums == "reduce"
    spec, device = shard_of(model.spec, rank.count), open_device(settings.device)
    draft = None if model.draft is None else load_model(model.draft, settings.of_draft())
    if settings.num_threads:
        torch.set_num_threads(max(1, settings.num_threads // rank.count))
    reader = ShardReader(weight_reader(model, settings, note_loaded), model.spec, rank, sums=sums)
    try:
        weights = marked(TorchWeights.load(spec, reader, DTYPES[settings.dtype], device), spec, rank, sums=sums)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the weights of a rank do not fit into the memory of {device}") from error
    block = block_spec(replace(model, spec=spec), settings)
    cache = TorchCache(block, create_attention(spec, settings), device, num_blocks=0)
    cache.draft = None if draft is None else draft.cache
    implementations = implementations_for(weights, settings, cache)
    if settings.batch_invariant:
        like = torch.empty(0, dtype=weights.dtype, device=device)
        require_same_bits(split_matrices(weights, model.spec, rank), implementations.product, like)
    product, experts = (
        RanksProduct(implementations.product, group),
        RanksExperts(implementations.experts, group, sums=sums),
    )
    implementations = replace(implementations, product=product, experts=experts)
    group.gather(torch.zeros(1, 1, device=device))
    if cache.spec.dtype == "int4":
        weights = with_key_centres(spec, weights, implementations)
    return Shard(TorchDecoder(spec, weights, implementations), cache, draft)


class SplitMatrix(NamedTuple):
    """A matrix split among ranks: its inputs, and for each fused part the outputs and the share of this rank."""

    num_inputs: int
    parts: tuple[tuple[int, Rank], ...]


def split_matrices(weights: TorchWeights, spec: DecoderSpec, rank: Rank) -> set[SplitMatrix]:
    """Return the split matrices of a rank's weights, each shape once. `spec`: of the whole model."""
    matrices = set()

    def add(matrix: Matrix, *sizes: tuple[int, Rank]) -> None:
        matrices.add(SplitMatrix(matrix.weight.shape[-1], sizes or ((matrix.weight.shape[-2] * rank.count, rank),)))

    if isinstance(weights.head, ShardedMatrix):
        add(weights.head)
    for layer, own in zip(weights.layers, spec.layers, strict=True):
        heads = spec.attention_of(own)
        keys = rank.among(min(rank.count, heads.num_kv_heads))
        num_stored = 0 if own.keys_of is not None else 1 if own.keys_are_values else 2
        projected = [(heads.num_heads, rank), *[(heads.num_kv_heads, keys)] * num_stored]
        add(layer.projection, *((count * heads.head_dim, of) for count, of in projected))
        add(layer.output)
        experts = None if layer.experts is None else spec.experts
        size = own.intermediate_size or spec.mlp.intermediate_size if experts is None else experts.shared_size
        for mlp, width in ((layer.mlp, size), (layer.experts, 0 if experts is None else experts.intermediate_size)):
            if mlp is not None:
                add(mlp.up, *(((width, rank),) * (2 if spec.mlp.gated else 1)))
                add(mlp.down)
    return matrices


def require_same_bits(matrices: Iterable[SplitMatrix], product: Product, like: torch.Tensor) -> None:
    """Raise `InvalidConfigError` unless a rank's outputs have the same bits as in the whole matrix. Does not mutate.

    Tries random numbers for each matrix, with the dtype and device of `like`, because a library may choose another
    kernel for a narrower matrix.
    """
    random = torch.Generator().manual_seed(0)
    for num_inputs, parts in matrices:
        starts = accumulate((size for size, _ in parts), initial=0)
        own = torch.cat(
            [start + torch.arange(size)[of.share_of(size)] for start, (size, of) in zip(starts, parts, strict=False)]
        )
        whole = torch.randn((sum(size for size, _ in parts), num_inputs), generator=random).to(like)
        rows = torch.randn((NUM_ROWS, num_inputs), generator=random).to(like)
        if not torch.equal(product(rows, Matrix(whole))[:, own], product(rows, Matrix(whole[own]))):
            shape = f"{len(own)} of {len(whole)} outputs of {num_inputs} numbers"
            allowed = f"1 with batch_invariant: on this machine {shape} have other bits than in the whole matrix"
            raise InvalidConfigError(FIELD, parts[0][1].count, allowed)
