"""From a model folder to a worker that runs it on a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.torch.attention.base import STORED_AS, AttentionBackend
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import Engines, TorchDecoder
from quire.compute.torch.host_sampler import HostSampler
from quire.compute.torch.operations import PlainOperations
from quire.compute.torch.products import Product, choose_tile, keep_sums_whole, product
from quire.compute.torch.runner import TorchRunner
from quire.compute.torch.weights import DTYPES, PartReader, TorchWeights
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.worker import Worker
from quire.core.errors import InvalidConfigError
from quire.core.executor import NoteLoaded
from quire.core.kv_spec import KVCacheSpec
from quire.core.step import MAX_PROMPT_LOGITS

BLOCK_SIZES: Final = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """How torch runs a model; `device` is "cpu", "cuda" or "cuda:1"."""

    device: str = "cuda"
    dtype: str = "bfloat16"
    weights: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    batch_invariant: bool = False

    @property
    def stored_kv_dtype(self) -> str:
        """The numbers of keys and values: those of the weights, where nothing else was said."""
        return self.dtype if self.kv_dtype == "auto" else self.kv_dtype


def kv_cache_spec(spec: DecoderSpec, settings: TorchSettings) -> KVCacheSpec:
    """Return what a block holds; raises `InvalidConfigError` for what is not computed with or not stored."""
    if settings.dtype not in DTYPES:
        raise InvalidConfigError("dtype", settings.dtype, f"one of {', '.join(DTYPES)}")
    if settings.block_size not in BLOCK_SIZES:
        raise InvalidConfigError("block_size", settings.block_size, f"one of {', '.join(map(str, BLOCK_SIZES))}")
    if settings.stored_kv_dtype not in STORED_AS:
        raise InvalidConfigError("kv_dtype", settings.kv_dtype, f"one of {', '.join(STORED_AS)}")
    return spec.kv_cache_spec(settings.block_size, settings.stored_kv_dtype)


def create_attention(settings: TorchSettings) -> AttentionBackend[Any]:
    """Return how paged attention is computed on the device of the settings."""
    return PlainAttention(torch.device(settings.device))


def activation_bytes(spec: DecoderSpec, settings: TorchSettings) -> int:
    """Return the bytes of activations and logits that steps of the settings' size take; by a formula, an upper bound.

    A layer holds its input, its output and what lies between at once, in float32 where numbers are made exact.
    """
    attention, mlp = spec.attention, spec.mlp
    heads = (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
    per_token = 6 * spec.hidden_size + 3 * heads + 3 * mlp.intermediate_size * (2 if mlp.gated else 1)
    num_logits = settings.max_num_seqs + MAX_PROMPT_LOGITS
    return 4 * (settings.max_num_batched_tokens * per_token + 3 * num_logits * spec.vocab_size)


def load_worker(
    model_folder: Path,
    model: ModelDescription,
    settings: TorchSettings,
    *,
    num_blocks: int,
    num_host_blocks: int = 0,
    note_loaded: NoteLoaded | None = None,
) -> Worker:
    """Return a worker for a model folder; `start` it to allocate its KV memory.

    The checkpoint is checked whole before a weight is read; then `note_loaded` is told how far that is.
    """
    checkpoint = Checkpoint.open(model_folder)
    cache = TorchCache(
        kv_cache_spec(model.spec, settings),
        create_attention(settings),
        torch.device(settings.device),
        num_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
    )
    # Of half precision there are two kinds, and the reader knows one: the other is made of float32, on the way.
    dtype = "float32" if settings.dtype == "float16" else settings.dtype
    reader = WeightReader(model.spec, checkpoint, dtype, settings.weights, note_loaded)
    return make_worker(model.spec, reader, settings, cache, eos_token_ids=frozenset(model.eos_token_ids))


def make_worker(
    spec: DecoderSpec,
    reader: PartReader,
    settings: TorchSettings,
    cache: TorchCache,
    *,
    eos_token_ids: frozenset[int] = frozenset(),
) -> Worker:
    """Return a worker for a spec and whatever its weights are read from, over KV memory of `kv_cache_spec`."""
    weights = TorchWeights.load(spec, reader, DTYPES[settings.dtype], cache.device)
    engines = Engines(cache.attention, PlainOperations(cache.attention), _product(weights, settings))
    runner = TorchRunner(TorchDecoder(spec, weights, engines), cache.device)
    return Worker(runner, cache, HostSampler(ReferenceSampler()), eos_token_ids=eos_token_ids)


def _product(weights: TorchWeights, settings: TorchSettings) -> Product:
    if not settings.batch_invariant:
        return product
    keep_sums_whole()
    return choose_tile(weights.matrices(), weights.dtype)
