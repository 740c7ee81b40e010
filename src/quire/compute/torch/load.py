"""Loads a model for a device: from its folder to the parts of a worker."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from quire.compute.arrays import FloatArray
from quire.compute.backend import DraftParts, GuessLayerParts, WorkerParts
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.sampling.reference import ReferenceSampler
from quire.compute.torch.adapters import AdapterSlots
from quire.compute.torch.attention.base import AttentionBackend
from quire.compute.torch.attention.plain import PlainAttention
from quire.compute.torch.block_types import kept_blocks
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.decoder import Implementations, TorchDecoder
from quire.compute.torch.experts import ExpertOperations, PlainExperts
from quire.compute.torch.footprint import DeviceMemory, Footprint, measure
from quire.compute.torch.graphs import CudaRecorder, StepGraphs
from quire.compute.torch.guess_layer import TorchLayer
from quire.compute.torch.host_sampler import HostSampler
from quire.compute.torch.images import load_encoder, rehearse
from quire.compute.torch.operations import Operations, PlainOperations
from quire.compute.torch.products import Product, choose_tile, keep_sums_whole, product
from quire.compute.torch.rehearsal import largest_steps, with_images
from quire.compute.torch.runner import DeviceSampler, Graphs, TorchRunner
from quire.compute.torch.settings import TorchSettings, block_spec, kv_cache_spec, most_recorded
from quire.compute.torch.weights import DTYPES, PartReader, TorchWeights
from quire.compute.vision.encoder import TowerEncoder
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.worker.key_centres import BLOCK, key_centres, num_blocks
from quire.compute.worker.model_runner import StepInputs
from quire.core.errors import ExecutionError, OutOfMemoryError
from quire.core.executor import NoteLoaded


def create_attention(spec: DecoderSpec, settings: TorchSettings) -> AttentionBackend[Any]:
    """Return the attention backend of the settings: by default, Triton kernels on a GPU."""
    device, stored, num_heads = torch.device(settings.device), kv_cache_spec(spec, settings), spec.attention.num_heads
    if settings.attention == "plain" or device.type != "cuda":
        return PlainAttention(device)
    if settings.attention == "flashinfer":
        from quire.compute.torch.attention.flashinfer import FlashInferAttention, load_package

        return FlashInferAttention(load_package(), stored, device, num_heads=num_heads)
    from quire.compute.torch.attention.triton import TritonAttention  # needs Triton

    return TritonAttention(stored, device, num_heads=num_heads, batch_invariant=settings.batch_invariant)


def open_device(name: str) -> torch.device:
    """Return a device that works; raises a one-line `ExecutionError` if torch cannot open it."""
    device = torch.device(name)
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError) as error:  # from torch without CUDA, and with CUDA
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise ExecutionError(f"torch cannot open the device {name}: {why}") from error
    return device


class Guessers(NamedTuple):
    """What guesses for a model, on the same device: a draft model, a layer of the model, or neither."""

    draft: LoadedModel | None = None
    layer: LoadedLayer | None = None

    @property
    def cache(self) -> TorchCache | None:
        """The KV memory of the guesser, in the blocks of the model."""
        return next((each.cache for each in self if each is not None), None)


NO_GUESSERS: Final = Guessers()


class LoadedModel:
    """A model on a device, and a KV memory that is not allocated yet: enough to make a worker.

    `guessers`: what guesses for it, over the same blocks (`TorchCache.draft`). `encoder`: of images.
    """

    def __init__(
        self,
        decoder: TorchDecoder,
        cache: TorchCache,
        settings: TorchSettings,
        eos_token_ids: frozenset[int],
        *,
        guessers: Guessers = NO_GUESSERS,
        encoder: TowerEncoder | None = None,
    ) -> None:
        self.decoder = decoder
        self.cache = cache
        self._settings = settings
        self._eos_token_ids = eos_token_ids
        self._draft, self._layer = guessers
        self._encoder = encoder
        self.sampler = create_sampler(decoder.spec.vocab_size, cache.device)
        room = settings.adapter_room
        self._slots = None if room is None else AdapterSlots(decoder.spec, room, decoder.dtype, cache.device)

    def measured(self, memory: DeviceMemory, note_loaded: NoteLoaded | None = None) -> Footprint:
        """Return the model's memory without KV blocks. Mutates: allocates a KV memory of one block meanwhile.

        Raises `InvalidConfigError` if the largest steps or their graphs do not fit next to the weights.
        """
        self.cache.resize(1, 0)
        self.cache.allocate()
        try:
            footprint = measure(
                memory,
                lambda: self._prepared(records=False),
                lambda: self._prepared(records=True, note_loaded=note_loaded),
            )
            return footprint if self._slots is None else footprint.without_adapters(self._slots.num_bytes)
        finally:
            self.cache.release()

    def parts(self, num_blocks: int, num_host_blocks: int = 0, note_loaded: NoteLoaded | None = None) -> WorkerParts:
        """Return the parts of a worker with this many blocks. Mutates: the worker gets the KV memory."""
        self.cache.resize(num_blocks, num_host_blocks)
        runner = self.runner(self.new_graphs(note_loaded))
        parts = WorkerParts(
            runner,
            self.cache,
            self.sampler,
            self._eos_token_ids,
            launcher=runner,
            adapters=runner,
            has_adapter=runner.has_adapter,
            image_encoder=self._encoder,
        )
        if self._layer is not None:
            layer = self._layer.over(runner)
            guesser = GuessLayerParts(layer, self.sampler, self._layer.decoder.spec.context_length)
            return replace(parts, layer=guesser, on_start=layer.prepare)
        return parts if self._draft is None else self._draft.join(parts, runner.vocab_size)

    def join(self, parts: WorkerParts, vocab_size: int) -> WorkerParts:
        """Return the parts of a model with `vocab_size` tokens, with this model as its draft model. Does not mutate."""
        runner, spec = self.runner(self.new_graphs(None), launches=False), self.decoder.spec
        sampler = create_sampler(min(vocab_size, spec.vocab_size), self.cache.device)
        draft = DraftParts(
            runner, self.cache, sampler, spec.context_length, most_tokens=self._settings.max_num_batched_tokens
        )
        return replace(parts, draft=draft, on_start=partial(runner.prepare, self.cache))

    def _prepared(
        self, *, records: bool, launches: bool = True, note_loaded: NoteLoaded | None = None
    ) -> list[TorchRunner]:
        """Return the runners of the model and of its draft model, after their largest steps, and those of its layer.

        An image is encoded between steps, so its state is there meanwhile.
        """
        if self._encoder is not None:
            rehearse(self._encoder)
        runner = self.runner(self.new_graphs(note_loaded) if records else None, launches=launches)
        layer = None if self._layer is None else self._layer.over(runner)
        runner.prepare(self.cache)
        if layer is not None:
            layer.prepare()
        return [runner] if self._draft is None else [runner, *self._draft._prepared(records=records, launches=False)]

    def runner(self, graphs: StepGraphs | None, *, launches: bool = True) -> TorchRunner:
        """Return a runner of the model over its KV memory. Does not mutate.

        `launches`: whether it also draws; a runner with graphs then records draws as well.
        """
        draws = None
        if graphs is not None and launches:
            from quire.compute.torch.draw_graphs import DrawGraphs  # needs Triton

            draws = DrawGraphs(self.decoder, graphs.recorder, self._settings.max_num_seqs)
        return TorchRunner(
            self.decoder,
            self.sampler,
            graphs=Graphs(graphs, draws),
            rehearsals=self.rehearsals(),
            slots=self._slots,
            num_rows=self._settings.max_num_seqs,
        )

    def rehearsals(self) -> tuple[StepInputs, ...]:
        """Return the largest steps; none on a CPU, which compiles nothing."""
        steps = rehearsals_of(self.decoder, self.cache, self._settings)
        if not steps:
            return ()
        return with_images(steps, self.decoder.spec) if self._settings.reads_images else steps

    def new_graphs(self, note_loaded: NoteLoaded | None) -> StepGraphs | None:
        """Return the graphs of the model, not recorded yet; None if steps are not recorded."""
        if self.cache.device.type != "cuda" or not self._settings.graphs:
            return None
        settings, spec = self._settings, self.decoder.spec
        max_short = settings.max_num_seqs + settings.max_step_drafts
        num_processors = torch.cuda.get_device_properties(self.cache.device).multi_processor_count
        max_tokens = most_recorded(spec, settings, num_processors)
        return StepGraphs(self.decoder, CudaRecorder(), max_short, max_tokens, note_loaded=note_loaded)


@dataclass(frozen=True, slots=True)
class LoadedLayer:
    """The layer of a model that guesses, on its device, and its KV memory in the model's blocks."""

    decoder: TorchDecoder
    cache: TorchCache
    settings: TorchSettings

    def over(self, runner: TorchRunner) -> TorchLayer:
        """Return the layer of a model with this runner. Does not mutate."""
        return TorchLayer(self.decoder, self.cache, runner, rehearsals_of(self.decoder, self.cache, self.settings))


def rehearsals_of(decoder: TorchDecoder, cache: TorchCache, settings: TorchSettings) -> tuple[StepInputs, ...]:
    """Return the largest steps of texts; none on a CPU, which compiles nothing."""
    if cache.device.type != "cuda":
        return ()
    return largest_steps(cache.spec, settings, decoder.spec.context_length)


def load_model(model: ModelDescription, settings: TorchSettings, note_loaded: NoteLoaded | None = None) -> LoadedModel:
    """Return a model on its device, and its draft model or layer that guesses.

    Checks each whole checkpoint before it reads weights. Calls `note_loaded` with the progress of the model. Raises
    `ExecutionError` for a device that cannot be opened, `OutOfMemoryError` for weights that do not fit.
    """
    if settings.num_threads:
        torch.set_num_threads(settings.num_threads)
    device = open_device(settings.device)
    cache = TorchCache(block_spec(model, settings), create_attention(model.spec, settings), device, num_blocks=0)
    reader = weight_reader(model, settings, note_loaded)
    guessers = load_guessers(model, settings, device)
    cache.draft = guessers.cache
    decoder = load_decoder(model.spec, reader, settings, cache)
    encoder = image_encoder(model, settings, device)
    eos_token_ids = frozenset(model.eos_token_ids)
    return LoadedModel(decoder, cache, settings, eos_token_ids, guessers=guessers, encoder=encoder)


def load_guessers(model: ModelDescription, settings: TorchSettings, device: torch.device) -> Guessers:
    """Return the draft model of a model, or its layer that guesses, if it has one. Raises as `load_model`."""
    own, settings = model.draft, settings.of_draft()
    if own is None:
        return NO_GUESSERS
    if not own.spec.joins_states:
        return Guessers(draft=load_model(own, settings))
    cache = TorchCache(block_spec(own, settings), create_attention(own.spec, settings), device, num_blocks=0)
    decoder = load_decoder(own.spec, weight_reader(own, settings, None), settings, cache)
    return Guessers(layer=LoadedLayer(decoder, cache, settings))


def image_encoder(model: ModelDescription, settings: TorchSettings, device: torch.device) -> TowerEncoder | None:
    """Return the encoder of a model that reads images; None: it reads texts only."""
    if model.vision is None or not settings.reads_images:
        return None
    return load_encoder(model.vision, model.source.tensors(), settings, device)


def weight_reader(model: ModelDescription, settings: TorchSettings, note_loaded: NoteLoaded | None) -> WeightReader:
    """Return the reader of a model's checkpoint, which is checked here."""
    checkpoint = model.source.tensors()
    # The reader supports bfloat16 and float32; float16 is converted from float32 while loading.
    dtype = "float32" if settings.dtype == "float16" else settings.dtype
    kept = kept_blocks(model.spec, checkpoint.block_types, settings)
    return WeightReader(model.spec, checkpoint, dtype, settings.weights, note_loaded, block_types=kept)


def load_decoder(spec: DecoderSpec, reader: PartReader, settings: TorchSettings, cache: TorchCache) -> TorchDecoder:
    """Return a decoder for a spec with the weights of any reader, over KV memory of `kv_cache_spec`."""
    try:
        weights = TorchWeights.load(spec, reader, DTYPES[settings.dtype], cache.device)
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(f"the weights do not fit into the memory of {cache.device}") from error
    implementations = implementations_for(weights, settings, cache)
    if cache.spec.dtype == "int4" and spec.vocab_size:
        weights = with_key_centres(spec, weights, implementations)
    return TorchDecoder(spec, weights, implementations)


def implementations_for(weights: TorchWeights, settings: TorchSettings, cache: TorchCache) -> Implementations:
    """Return the implementations for some weights and KV memory."""
    attention, chosen = cache.attention, _product(weights, settings)
    experts = create_experts(chosen, cache.device, batch_invariant=settings.batch_invariant)
    return Implementations(attention, create_operations(attention, cache.device), chosen, experts)


def with_key_centres(spec: DecoderSpec, weights: TorchWeights, implementations: Implementations) -> TorchWeights:
    """Return the weights with the centre of the keys of each layer, computed plainly over float32 KV memory."""
    device, kv_spec = weights.embedding.weight.device, spec.kv_cache_spec(BLOCK)
    attention: AttentionBackend[Any] = PlainAttention(device)
    plain = replace(implementations, attention=attention, operations=PlainOperations(attention))
    runner = TorchRunner(TorchDecoder(spec, weights, plain), create_sampler(spec.vocab_size, device))
    memory = TorchCache(kv_spec, attention, device, num_blocks=num_blocks(spec, kv_spec))
    return weights.with_key_centres(key_centres(spec, memory, runner, _read_keys))


def _read_keys(cache: TorchCache, layer: int) -> FloatArray:
    """Return the keys of a layer by slot, `[num_slots, num_kv_heads, head_dim]`."""
    keys: FloatArray = cache.pairs()[layer].keys.transpose(1, 2).flatten(0, 1).cpu().numpy()
    return keys


def create_operations(attention: AttentionBackend[Any], device: torch.device) -> Operations:
    """Return the operations between products: kernels on a GPU, torch operations elsewhere."""
    if device.type != "cuda":
        return PlainOperations(attention)
    from quire.compute.torch.fused_operations import FusedOperations  # needs Triton

    return FusedOperations(attention)


def create_experts(product: Product, device: torch.device, *, batch_invariant: bool) -> ExpertOperations[Any]:
    """Return the operations of experts: kernels on a GPU, elsewhere the usual product, expert by expert."""
    if device.type != "cuda":
        return PlainExperts(product)
    from quire.compute.torch.fused_experts import FusedExperts  # needs Triton

    return FusedExperts(batch_invariant=batch_invariant)


def create_sampler(vocab_size: int, device: torch.device) -> DeviceSampler:
    """Return the sampler: kernels on a GPU, elsewhere the reference sampler."""
    if device.type != "cuda":
        return HostSampler(ReferenceSampler(vocab_size))
    from quire.compute.torch.sampling import TorchSampler  # needs Triton

    return TorchSampler(vocab_size)


def _product(weights: TorchWeights, settings: TorchSettings) -> Product:
    if torch.device(settings.device).type != "cuda":
        return choose_tile(weights.matrices(), weights.dtype) if settings.batch_invariant else product
    from quire.compute.torch.fused_products import FusedProduct  # needs Triton

    if settings.batch_invariant:
        keep_sums_whole()
    return FusedProduct.of(weights.matrices(), weights.dtype, batch_invariant=settings.batch_invariant)
