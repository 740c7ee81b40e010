"""Loads the shard of a rank: from the folder of a model to a decoder that computes some of its outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

import torch

from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import Engines
from quire.compute.torch.load import create_attention, engines_for, open_device
from quire.compute.torch.parallel.group import GatheringProduct, RankGroup
from quire.compute.torch.parallel.shards import ShardReader, marked
from quire.compute.torch.parallel.split import FIELD, Rank, shard_of
from quire.compute.torch.products import Matrix, Product
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from quire.compute.torch.weights import DTYPES, TorchWeights
from quire.compute.weights.decoder_weights import WeightReader
from quire.core.errors import InvalidConfigError
from quire.core.executor import NoteLoaded

NUM_ROWS: Final = 16


class Shard(NamedTuple):
    """What a rank computes with. `spec`: its heads and outputs alone; `cache`: the KV memory of its heads."""

    spec: DecoderSpec
    weights: TorchWeights
    engines: Engines
    cache: TorchCache


def load_shard(
    model: ModelDescription,
    settings: TorchSettings,
    group: RankGroup,
    note_loaded: NoteLoaded | None = None,
    make_cache: Callable[..., TorchCache] = TorchCache,
) -> Shard:
    """Return the shard of a rank, once all ranks have theirs."""
    torch.set_num_threads(max(1, settings.num_threads // group.rank.count))
    spec, device = shard_of(model.spec, group.rank.count), open_device(settings.device)
    dtype = "float32" if settings.dtype == "float16" else settings.dtype
    reader = WeightReader(model.spec, model.source.tensors(), dtype, settings.weights, note_loaded)
    shard = TorchWeights.load(spec, ShardReader(reader, group.rank), DTYPES[settings.dtype], device)
    weights = marked(shard, spec, group.rank)
    cache = make_cache(kv_cache_spec(spec, settings), create_attention(spec, settings), device, num_blocks=0)
    engines = engines_for(weights, settings, cache)
    if settings.batch_invariant:
        require_same_bits(weights, engines.product, group.rank)
    engines = replace(engines, product=GatheringProduct(engines.product, group))
    group.gather(torch.zeros(1, 1))
    return Shard(spec, weights, engines, cache)


def require_same_bits(weights: TorchWeights, product: Product, rank: Rank) -> None:
    """Raise `InvalidConfigError` unless some outputs of a matrix are computed as those of all are. Does not mutate.

    Tries random numbers in a matrix of each shape, because a library may choose another kernel for a narrower one.
    """
    random = torch.Generator().manual_seed(0)
    for size in {matrix.weight.shape for matrix in weights.matrices()}:
        whole = torch.randn((size[0] * rank.count, size[1]), generator=random).to(weights.dtype)
        rows = torch.randn((NUM_ROWS, size[1]), generator=random).to(weights.dtype)
        share = rank.share_of(len(whole))
        if not torch.equal(product(rows, Matrix(whole))[:, share], product(rows, Matrix(whole[share]))):
            allowed = "1 with batch_invariant: on this machine a part of a matrix has other bits than the whole"
            raise InvalidConfigError(FIELD, rank.count, allowed)
