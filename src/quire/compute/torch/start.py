"""TorchStart: loads a model on a device, in one go or in two, with a look at what is free between them.

    measured ──► weights on the device, Footprint          the caller then decides how many blocks there are
    call     ──► Worker over so many blocks                loads the weights, where that was not done

It is made where an engine is planned, which may be a process that computes nothing: torch is imported when it loads.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from quire.compute.models import ModelDescription
from quire.compute.torch.footprint import Footprint
from quire.compute.torch.settings import TorchSettings
from quire.core.executor import Executor, NoteLoaded

if TYPE_CHECKING:
    from quire.compute.torch.load import LoadedModel


class TorchStart:
    """Loads a model folder; implements `quire.engine.factory.Load`."""

    def __init__(self, folder: Path, model: ModelDescription, settings: TorchSettings) -> None:
        self._folder = folder
        self._model = model
        self._settings = settings
        self._loaded: LoadedModel | None = None  # measured, and waiting for its blocks

    def measured(self, note_loaded: NoteLoaded | None = None) -> Footprint:
        """Load the weights, compute the largest steps, and return what that takes. Mutates: keeps what is loaded."""
        from quire.compute.torch.cuda_memory import CudaMemory

        self._loaded = self._load(note_loaded)
        return self._loaded.measured(CudaMemory(self._settings.device), note_loaded)

    def __call__(self, num_blocks: int, num_host_blocks: int, note_loaded: NoteLoaded | None = None) -> Executor:
        """Return a worker over so many blocks. Mutates: what was loaded to be measured is handed out, once."""
        loaded, self._loaded = self._loaded or self._load(note_loaded), None
        return loaded.worker(num_blocks, num_host_blocks, note_loaded)

    def _load(self, note_loaded: NoteLoaded | None) -> LoadedModel:
        from quire.compute.torch.load import load_model

        return load_model(self._folder, self._model, self._settings, note_loaded)
