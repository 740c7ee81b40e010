"""From a model folder to a worker that runs it on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.torch.attention.base import AttentionBackend
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import Engines, TorchDecoder
from quire.compute.torch.graphs import CudaRecorder, DecodeGraphs
from quire.compute.torch.host_sampler import HostSampler
from quire.compute.torch.operations import Operations, PlainOperations
from quire.compute.torch.products import Product, choose_tile, keep_sums_whole, product
from quire.compute.torch.rehearsal import largest_steps
from quire.compute.torch.runner import DeviceSampler, TorchRunner
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from quire.compute.torch.weights import DTYPES, PartReader, TorchWeights
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.model_runner import StepInputs
from quire.compute.worker.worker import Worker
from quire.core.errors import ExecutionError, OutOfMemoryError
from quire.core.executor import NoteLoaded


def create_attention(spec: DecoderSpec, settings: TorchSettings) -> AttentionBackend[Any]:
    """Return how paged attention is computed, as the settings say: left to itself, by Triton's kernels on a GPU."""
    device, stored, num_heads = torch.device(settings.device), kv_cache_spec(spec, settings), spec.attention.num_heads
    if settings.attention == "plain" or device.type != "cuda":
        return PlainAttention(device)
    if settings.attention == "flashinfer":
        from quire.compute.torch.attention.flashinfer import FlashInferAttention, load_package

        return FlashInferAttention(load_package(), stored, device, num_heads=num_heads)
    from quire.compute.torch.attention.triton import TritonAttention  # needs Triton

    return TritonAttention(stored, device, num_heads=num_heads, batch_invariant=settings.batch_invariant)


def open_device(name: str) -> torch.device:
    """Return a device that computes; raises `ExecutionError`, in a line, where torch cannot open it."""
    device = torch.device(name)
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:  # what torch raises, built without CUDA and with it
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ExecutionError(f"torch cannot open the device {name}: {why}") from error
    return device


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
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    device = open_device(settings.device)
    cache = TorchCache(
        kv_cache_spec(model.spec, settings),
        create_attention(model.spec, settings),
        device,
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
    try:
        weights = TorchWeights.load(spec, reader, DTYPES[settings.dtype], cache.device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the weights do not fit into the memory of {cache.device}") from error
    engines = Engines(cache.attention, create_operations(cache.attention, cache.device), _product(weights, settings))
    decoder, sampler = TorchDecoder(spec, weights, engines), create_sampler(spec.vocab_size, cache.device)
    graphs: DecodeGraphs | None = None
    rehearsals: tuple[StepInputs, ...] = ()
    if cache.device.type == "cuda":
        rehearsals = largest_steps(cache.spec, settings, spec.context_length)
        # Experts are launched in the shape of what the router chose; a recording has one shape.
        if settings.graphs and not any(layer.sparse for layer in spec.layers):
            graphs = DecodeGraphs(decoder, CudaRecorder(), settings.max_num_seqs)
    runner = TorchRunner(decoder, sampler, cache.device, graphs=graphs, rehearsals=rehearsals)
    return Worker(runner, cache, sampler, eos_token_ids=eos_token_ids, launcher=runner)


def create_operations(attention: AttentionBackend[Any], device: torch.device) -> Operations:
    """Return what computes between products: kernels on a GPU, operations of torch elsewhere."""
    if device.type != "cuda":
        return PlainOperations(attention)
    from quire.compute.torch.fused_operations import FusedOperations  # needs Triton

    return FusedOperations(attention)


def create_sampler(vocab_size: int, device: torch.device) -> DeviceSampler:
    """Return what chooses tokens: where the logits are on a GPU, else the definition itself."""
    if device.type != "cuda":
        return HostSampler(ReferenceSampler())
    from quire.compute.torch.sampling import TorchSampler  # needs Triton

    return TorchSampler(vocab_size)


def _product(weights: TorchWeights, settings: TorchSettings) -> Product:
    if not settings.batch_invariant:
        return product
    keep_sums_whole()
    return choose_tile(weights.matrices(), weights.dtype)
