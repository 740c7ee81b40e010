"""The torch engine as a backend: on a GPU, or on a CPU to be tested.

    measured ──► weights on the device, Footprint          the caller then decides how many blocks there are
    load     ──► parts of a worker over this many blocks     loads the weights, where that was not done

It is made where an engine is planned, which may be a process that computes nothing: torch is imported when it loads.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from quire.compute.backend import BackendFacts, WorkerParts, needs_on_host
from quire.compute.models import ModelDescription
from quire.compute.torch.device import DeviceFacts, choose_device, look
from quire.compute.torch.footprint import Footprint
from quire.compute.torch.settings import DTYPES, TorchSettings, activation_bytes, device_needs, kv_cache_spec
from quire.compute.weights.decoder_weights import weight_bytes
from quire.core.config import EngineConfig, ResolvedConfig
from quire.core.errors import InvalidConfigError
from quire.core.executor import NoteLoaded
from quire.core.granted import free_memory, usable_cores
from quire.core.memory_needs import MemoryNeeds

if TYPE_CHECKING:
    from quire.compute.torch.load import LoadedModel

GPU_KV_SHARE: Final = 0.9
"""Of the free memory of a GPU, which nobody else is expected to want; what is left is for its allocator."""


class TorchBackend:
    """Implements `Backend` with torch. `gpu`: that on which it computes; None on a CPU, or a GPU not looked at."""

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
        self._loaded: LoadedModel | None = None  # measured, and waiting for its blocks

    @classmethod
    def of(cls, device: str, config: ResolvedConfig, model: ModelDescription) -> TorchBackend:
        """Return the backend for a model on cpu or cuda, whether that is here or not.

        Raises `InvalidConfigError` for settings that it does not have.
        """
        if device == "cpu" and find_spec("torch") is None:
            raise InvalidConfigError("backend", "torch", "native or reference: torch is not installed")
        if config.touch_kv_memory and device == "cuda":
            raise InvalidConfigError("touch_kv_memory", True, "False: a GPU gives its memory at once")
        dtype = config.dtype
        if dtype == "auto":
            dtype = model.dtype if model.dtype in DTYPES else "bfloat16"
        settings = TorchSettings(
            device=device,
            dtype=dtype,
            weights=config.weights,
            kv_dtype=config.kv_dtype,
            block_size=config.block_size,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            attention=config.attention_backend,
            batch_invariant=config.batch_invariant,
            graphs=config.cuda_graphs,
            num_threads=(config.num_threads or usable_cores()) if device == "cpu" else 0,
        )
        facts = BackendFacts(
            name="torch",
            device=device,
            config=config,
            dtype=dtype,
            instruction_set=device,
            num_threads=settings.num_threads,
            kv_spec=kv_cache_spec(model.spec, settings),
            weight_bytes=weight_bytes(model.spec, "bfloat16" if dtype == "float16" else dtype, config.weights),
            activation_bytes=activation_bytes(model.spec, settings),
        )
        return cls(facts, model, settings)

    @classmethod
    def on_gpu(cls, config: EngineConfig, model: ModelDescription) -> tuple[TorchBackend | None, str]:
        """Return the backend for the GPU of this machine; None, and why, where another device has to do.

        Raises `InvalidConfigError` where a GPU was asked for and there is none that can be used.
        """
        gpu = look(os.environ)
        if gpu.gpu is None and config.device == "auto":
            return None, ""
        found = cls.of("cuda", config.resolved(gpu.total_bytes), model)
        needs = device_needs(model.spec, found.facts.weight_bytes + found.facts.activation_bytes)
        choice = choose_device(gpu, config.device, needs)
        if choice.device == "cpu":
            return None, choice.notice
        facts = replace(found.facts, instruction_set=f"{gpu.gpu}, capability {gpu.dotted_capability}")
        return cls(facts, model, found._settings, gpu), ""

    def needs(self) -> MemoryNeeds:
        """Return what the engine is expected to take of its device."""
        if self.gpu is None:
            return needs_on_host(self.facts)
        free = self.gpu.free_bytes
        return _needs_on_gpu(Footprint.foreseen(self.facts.weight_bytes, self.facts.activation_bytes, free), free)

    def measured(self, note_loaded: NoteLoaded | None = None) -> MemoryNeeds | None:
        """Load the weights, compute the largest steps, and return what that takes; None on a CPU. Mutates."""
        if self.gpu is None:
            return None
        return _needs_on_gpu(self.footprint(note_loaded), self.gpu.free_bytes)

    def footprint(self, note_loaded: NoteLoaded | None = None) -> Footprint:
        """Load the weights, compute the largest steps, and return what they take. Mutates: keeps what is loaded."""
        from quire.compute.torch.cuda_memory import CudaMemory

        self._loaded = self._load(note_loaded)
        return self._loaded.measured(CudaMemory(self._settings.device), note_loaded)

    def load(self, num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> WorkerParts:
        """Return the parts of a worker. Mutates: what was loaded to be measured is handed out, once."""
        loaded, self._loaded = self._loaded or self._load(note_loaded), None
        return loaded.parts(num_blocks, num_host_blocks, note_loaded)

    def _load(self, note_loaded: NoteLoaded | None) -> LoadedModel:
        from quire.compute.torch.load import load_model

        return load_model(self._model, self._settings, note_loaded)


def _needs_on_gpu(footprint: Footprint, free_bytes: int) -> MemoryNeeds:
    """Return the needs of an engine on a GPU that has so much free before anything is opened."""
    return MemoryNeeds(
        footprint.weight_bytes,
        footprint.activation_bytes,
        rest_bytes=max(free_bytes - footprint.weight_bytes - footprint.free_bytes, 0),
        free_bytes=footprint.weight_bytes + footprint.free_bytes,
        kv_share=GPU_KV_SHARE,
        host_bytes=free_memory() or 0,
        graph_bytes=footprint.graph_bytes,
    )
