"""The torch engine as a backend: on a GPU, or on a CPU for tests.

    measured ──► weights on the device, Footprint          the caller then chooses the number of blocks
    load     ──► parts of a worker with this many blocks     loads the weights, unless loaded

A process that only plans an engine makes a backend too, so torch is imported only when the model is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from quire.compute.adapters.room import room_for
from quire.compute.backend import BackendFacts, WorkerParts, needs_on_host
from quire.compute.models import ModelDescription
from quire.compute.models.base import DecoderSpec
from quire.compute.models.guess_layer import joined_row_bytes
from quire.compute.models.vision.spec import VisionSpec
from quire.compute.torch.block_types import codings, kept_blocks
from quire.compute.torch.device import DeviceFacts, choose_device
from quire.compute.torch.footprint import Footprint
from quire.compute.torch.missing import missing
from quire.compute.torch.parallel.split import FIELD, SUMS, bytes_of_rank, require_gpus, shard_of, stored_by_all
from quire.compute.torch.settings import (
    DTYPES,
    TorchSettings,
    activation_bytes,
    block_spec,
    device_needs,
    image_bytes,
)
from quire.compute.vision.encoder import rows_bytes
from quire.compute.vision.weights import vision_bytes
from quire.core.config import MTP, EngineConfig, ResolvedConfig
from quire.core.errors import InvalidConfigError
from quire.core.executor import NoteLoaded
from quire.core.granted import free_memory, usable_cores
from quire.core.kv_spec import KVCacheSpec
from quire.core.memory_needs import MemoryNeeds
from quire.core.step import MAX_STEP_DRAFTS

if TYPE_CHECKING:
    from quire.compute.torch.load import LoadedModel

GPU_KV_SHARE: Final = 0.9
"""The share of a GPU's free memory to use: no other process should need it, and the rest is for the allocator."""

FP8_CAPABILITY: Final = (8, 9)


class TorchBackend:
    """Implements `Backend` with torch. `gpu`: the GPU that computes; None on a CPU, or if no GPU was checked."""

    def __init__(
        self,
        facts: BackendFacts,
        model: ModelDescription,
        settings: TorchSettings,
        gpu: DeviceFacts | None = None,
    ) -> None:
        self.facts = facts
        self.gpu = gpu
        self._model = model
        self._settings = settings
        self._loaded: LoadedModel | None = None  # measured, without blocks yet

    @classmethod
    def of(cls, device: str, config: ResolvedConfig, model: ModelDescription) -> TorchBackend:
        """Return the backend for a model on cpu or cuda, even if this machine lacks it.

        Raises `InvalidConfigError` for settings that it does not support.
        """
        models = [each for each in (model, model.draft) if each is not None]
        if lacks := next(filter(None, (missing(each.spec) for each in models)), ""):
            raise InvalidConfigError("backend", "torch", f"native or reference: torch does not run {lacks} yet")
        if device == "cpu" and find_spec("torch") is None:
            raise InvalidConfigError("backend", "torch", "native or reference: torch is not installed")
        if config.touch_kv_memory == "start" and device == "cuda":
            raise InvalidConfigError("touch_kv_memory", "start", "idle or use: a GPU allocates its memory at once")
        if config.weights == "int4":
            raise InvalidConfigError("weights", "int4", "auto, widened or int8: only the native backend has int4")
        if config.attention_backend == "flashinfer" and model.vision is not None:
            allowed = "triton or auto, or mmproj none: FlashInfer is not used for models that read images"
            raise InvalidConfigError("attention_backend", "flashinfer", allowed)
        dtype = config.dtype
        if dtype == "auto":
            dtype = model.dtype if model.dtype in DTYPES else "bfloat16"
        if config.tensor_parallel > 1:
            _require_ranks(config)
        room = room_for(model, config, 4 if dtype == "float32" else 2)
        settings = TorchSettings(
            device=device,
            dtype=dtype,
            weights=config.weights,
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_step_drafts=MAX_STEP_DRAFTS if config.max_drafts else 0,
            attention=config.attention_backend,
            batch_invariant=config.batch_invariant,
            graphs=config.cuda_graphs,
            num_threads=(config.num_threads or usable_cores()) if device == "cpu" else 0,
            tensor_parallel=config.tensor_parallel,
            tensor_parallel_sums=config.tensor_parallel_sums,
            max_model_len=config.max_model_len,
            adapter_room=room,
            reads_images=model.vision is not None,
        )
        facts = BackendFacts(
            name="torch",
            device=device,
            config=config,
            dtype=dtype,
            weights=config.weights,
            instruction_set=device,
            num_threads=settings.num_threads,
            kv_spec=_kv_spec(model, settings),
            weight_bytes=_weight_bytes(models, settings),
            activation_bytes=_activation_bytes(models, settings)
            + (0 if model.vision is None else _image_bytes(model.vision, model.spec, settings)),
            block_types=tuple(sorted({kind for each in models for kind in _kept(each, settings).values()})),
            makes_vectors=True,
            adapter_bytes=0 if room is None else room.num_bytes,
            adapter_room=room,
        )
        return cls(facts, model, settings)

    @classmethod
    def on_gpu(cls, gpu: DeviceFacts, config: EngineConfig, model: ModelDescription) -> tuple[TorchBackend | None, str]:
        """Return the backend for this machine's GPU; or None and the reason, if another device must compute.

        Raises `InvalidConfigError` if the user asked for a GPU and none can be used.
        """
        if config.device == config.backend == "auto" and (lacks := missing(model.spec)):
            return None, f"runs on the CPU: torch does not run {lacks} yet"
        require_gpus(gpu, config.tensor_parallel)
        backend = cls.of("cuda", config.resolved(gpu.total_bytes), model)
        num_bytes = backend.facts.weight_bytes + backend.facts.activation_bytes
        specs = [each.spec for each in (model, model.draft) if each is not None]
        choices = [choose_device(gpu, config.device, device_needs(spec, num_bytes)) for spec in specs]
        choice = next((each for each in choices if each.device == "cpu"), choices[0])
        if choice.device == "cpu":
            return None, choice.notice
        if backend.facts.kv_spec.dtype == "fp8" and gpu.capability < FP8_CAPABILITY:
            needed = f"{gpu.gpu} has compute capability {gpu.dotted_capability}, and fp8 needs 8.9 (Ada) or newer"
            raise InvalidConfigError("kv_dtype", config.kv_dtype, f"another type here: {needed}")
        facts = replace(backend.facts, instruction_set=f"{gpu.gpu}, capability {gpu.dotted_capability}")
        return cls(facts, model, backend._settings, gpu), ""

    def needs(self) -> MemoryNeeds:
        """Return the memory that the engine is expected to take on its device."""
        if self.gpu is None:
            return needs_on_host(self.facts)
        free = self.gpu.free_bytes
        footprint = Footprint.foreseen(self.facts.weight_bytes, self.facts.activation_bytes, free)
        return self._needs_on_gpu(footprint, free)

    def measured(self, note_loaded: NoteLoaded | None = None) -> MemoryNeeds | None:
        """Load the weights, compute the largest steps, and return the memory of both; None on a CPU. Mutates."""
        if self.gpu is None:
            return None
        return self._needs_on_gpu(self.footprint(note_loaded), self.gpu.free_bytes)

    def footprint(self, note_loaded: NoteLoaded | None = None) -> Footprint:
        """Load the weights, compute the largest steps, and return their memory. Mutates: keeps the loaded model."""
        from quire.compute.torch.cuda_memory import CudaMemory

        self._loaded = self._load(note_loaded)
        return self._loaded.measured(CudaMemory(self._settings.device), note_loaded)

    def load(self, num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> WorkerParts:
        """Return the parts of a worker. Mutates: a model that was loaded for measuring is handed over, once."""
        loaded, self._loaded = self._loaded or self._load(note_loaded), None
        return loaded.parts(num_blocks, num_host_blocks, note_loaded)

    def _needs_on_gpu(self, footprint: Footprint, free_bytes: int) -> MemoryNeeds:
        """Return the needs on a GPU with this much free memory before anything is opened; with ranks, those of each."""
        return MemoryNeeds(
            footprint.weight_bytes,
            footprint.activation_bytes,
            rest_bytes=max(free_bytes - footprint.weight_bytes - footprint.free_bytes, 0),
            free_bytes=footprint.weight_bytes + footprint.free_bytes,
            kv_share=GPU_KV_SHARE,
            host_bytes=(free_memory() or 0) // self._settings.tensor_parallel,
            graph_bytes=footprint.graph_bytes,
            adapter_bytes=self.facts.adapter_bytes,
        )

    def _load(self, note_loaded: NoteLoaded | None) -> LoadedModel:
        if self._settings.tensor_parallel > 1:
            from quire.compute.torch.parallel.ranks import load_ranks

            return load_ranks(self._model, self._settings, note_loaded)
        from quire.compute.torch.load import load_model

        return load_model(self._model, self._settings, note_loaded)


def _require_ranks(config: ResolvedConfig) -> None:
    """Raise `InvalidConfigError` for settings that several ranks do not support."""
    obstacles = {
        f"with speculation {MTP}, whose layer is not split": config.speculation == MTP,
        "with adapters, which are not split": bool(config.adapter) or config.adapter_memory is not None,
        "with a disk cache, which would hold the heads of one rank only": config.disk_cache is not None,
    }
    for obstacle, applies in obstacles.items():
        if applies:
            raise InvalidConfigError(FIELD, config.tensor_parallel, f"1 {obstacle}")
    if config.batch_invariant and config.tensor_parallel_sums == "reduce":
        allowed = "gather with batch_invariant: sums over ranks depend on the whole step"
        raise InvalidConfigError(SUMS, "reduce", allowed)


def _kv_spec(model: ModelDescription, settings: TorchSettings) -> KVCacheSpec:
    """Return the content of a block: of one rank on GPUs, else of all. Raises `InvalidConfigError` like `shard_of`."""
    count = settings.tensor_parallel
    if count == 1:
        return block_spec(model, settings)
    shard = shard_of(model.spec, count)
    if settings.device == "cpu":
        shard = stored_by_all(model.spec, count)
    return block_spec(replace(model, spec=shard), settings)


def _activation_bytes(models: Sequence[ModelDescription], settings: TorchSettings) -> int:
    """Return the bytes of activations of a model and what guesses for it. A layer of the model reuses the model's."""
    own = activation_bytes(models[0].spec, settings)
    others = [activation_bytes(each.spec, settings.of_draft()) for each in models[1:]]
    joined = sum(joined_row_bytes(each.spec) for each in models) * settings.max_num_batched_tokens
    return max(own, *others) + joined if joined else own + sum(others)


def _weight_bytes(models: Sequence[ModelDescription], settings: TorchSettings) -> int:
    """Return the bytes of the weights of a model and its draft model; on GPUs, of those that the first rank has."""
    dtype = "bfloat16" if settings.dtype == "float16" else settings.dtype
    count = settings.tensor_parallel if settings.device == "cuda" else 1
    counts = (count, *(1 for _ in models[1:]))
    of_texts = sum(
        bytes_of_rank(each.spec, n, (dtype, settings.weights, codings(_kept(each, settings))))
        for each, n in zip(models, counts, strict=True)
    )
    return of_texts + (0 if models[0].vision is None else vision_bytes(models[0].vision, dtype))


def _image_bytes(vision: VisionSpec, text: DecoderSpec, settings: TorchSettings) -> int:
    """Return the bytes for encoding an image; the rows of encoded ones are in the memory of the host."""
    rows = rows_bytes(vision, text) if settings.device == "cpu" else 0
    return image_bytes(vision, settings) + rows


def _kept(model: ModelDescription, settings: TorchSettings) -> Mapping[str, str]:
    return kept_blocks(model.spec, model.source.block_types(), settings)
