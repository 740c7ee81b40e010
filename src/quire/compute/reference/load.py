"""Loads a model for the reference decoder: from its description to the parts of a worker."""

from __future__ import annotations

from quire.compute.backend import WorkerParts
from quire.compute.models import ModelDescription
from quire.compute.reference.decoder import ReferenceDecoder
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.weights.codes import in_groups
from quire.compute.weights.decoder_weights import DecoderWeights
from quire.compute.worker.cache_engine import CacheEngine


def load_parts(
    model: ModelDescription,
    *,
    block_size: int,
    num_blocks: int,
    num_host_blocks: int = 0,
    weights: str = "auto",
    kv_dtype: str = "auto",
) -> WorkerParts:
    """Return the parts of a worker for a model.

    Checks the checkpoint, and raises `CheckpointError` if something is wrong with it. Weights, keys and
    values are float32, or rounded as `kv_dtype` stores them.
    """
    spec = model.spec
    loaded = DecoderWeights.load(spec, model.source.tensors(), weights=in_groups(weights))
    cache = CacheEngine(
        spec.kv_cache_spec(block_size),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )
    return WorkerParts(
        ReferenceDecoder(spec, loaded, kv_dtype=kv_dtype),
        cache,
        ReferenceSampler(),
        eos_token_ids=frozenset(model.eos_token_ids),
    )
