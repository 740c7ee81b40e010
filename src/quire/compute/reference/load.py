"""Loads a model for the reference decoder: from its description to the parts of a worker."""

from __future__ import annotations

from quire.compute.backend import DraftParts, GuessLayerParts, WorkerParts
from quire.compute.models import ModelDescription
from quire.compute.reference.adapters import AdaptedDecoder
from quire.compute.reference.decoder import ReferenceDecoder
from quire.compute.reference.images import reference_encoder
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.weights.codes import in_groups
from quire.compute.weights.decoder_weights import DecoderWeights
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.host_layer import HostLayer
from quire.core.kv_spec import KVCacheSpec


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

    Raises `CheckpointError` if the checkpoint is not valid. Weights, keys and values are float32; keys and values can
    be rounded as in `kv_dtype`.
    """
    spec = model.spec
    loaded = DecoderWeights.load(spec, model.source.tensors(), weights=in_groups(weights))
    cache = CacheEngine(
        block_spec(model, block_size),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )
    runner = AdaptedDecoder(ReferenceDecoder(spec, loaded, kv_dtype=kv_dtype))
    return WorkerParts(
        runner,
        cache,
        ReferenceSampler(),
        eos_token_ids=frozenset(model.eos_token_ids),
        draft=_draft_parts(model, cache, weights, kv_dtype),
        layer=_layer_parts(model.draft, cache, weights, runner),
        adapters=runner,
        has_adapter=runner.has_adapter,
        image_encoder=None if model.vision is None else reference_encoder(model.vision, model.source.tensors()),
    )


def block_spec(model: ModelDescription, block_size: int) -> KVCacheSpec:
    """Return the layout of a block, with the layers of the draft model if there is one."""
    spec = model.spec.kv_cache_spec(block_size)
    return spec if model.draft is None else spec.with_draft(model.draft.spec.kv_cache_spec(block_size))


def _draft_parts(model: ModelDescription, cache: CacheEngine, weights: str, kv_dtype: str) -> DraftParts | None:
    """Return the parts of a model's draft model, or None."""
    draft = model.draft
    if draft is None or cache.draft is None or draft.spec.joins_states:
        return None
    loaded = DecoderWeights.load(draft.spec, draft.source.tensors(), weights=in_groups(weights))
    runner = ReferenceDecoder(draft.spec, loaded, kv_dtype=kv_dtype)
    sampler = ReferenceSampler(min(model.spec.vocab_size, draft.spec.vocab_size))
    return DraftParts(runner, cache.draft, sampler, draft.spec.context_length, most_tokens=512)


def _layer_parts(
    model: ModelDescription | None, cache: CacheEngine, weights: str, ends: AdaptedDecoder
) -> GuessLayerParts | None:
    """Return the parts of a model's own layer that guesses, or None; `ends`: the model."""
    if model is None or cache.draft is None or not model.spec.joins_states:
        return None
    loaded = DecoderWeights.load(model.spec, model.source.tensors(), weights=in_groups(weights))
    runner = ReferenceDecoder(model.spec, loaded)
    return GuessLayerParts(HostLayer(runner, cache.draft, ends), ReferenceSampler(), model.spec.context_length)
