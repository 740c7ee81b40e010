"""Which backend computes: the GPU if one is usable, otherwise the compiled core, otherwise the reference."""

from __future__ import annotations

from quire.compute.backend import Backend
from quire.compute.models import ModelDescription
from quire.compute.reference.backend import ReferenceBackend
from quire.core.config import EngineConfig, ResolvedConfig
from quire.core.errors import InvalidConfigError


def choose_backend(config: EngineConfig, model: ModelDescription) -> tuple[Backend, str]:
    """Return what computes a model that was read, and a notice of why it is not the GPU, if there is one to give.

    Looks at the GPU where one may be used. Reads nothing: weights are looked for when the backend loads.
    Raises `InvalidConfigError` for settings that do not fit the model or this machine.
    """
    if config.device == "cpu" or config.backend in ("native", "reference"):
        return backend_on("cpu", config.resolved(), model), ""
    from quire.compute.torch.backend import TorchBackend

    on_gpu, notice = TorchBackend.on_gpu(config, model)
    return on_gpu or backend_on("cpu", config.resolved(), model), notice


def backend_on(device: str, config: ResolvedConfig, model: ModelDescription) -> Backend:
    """Return what computes on cpu or cuda, whether that is here or not; raises for settings that do not fit."""
    if device == "cuda" or config.backend == "torch":
        from quire.compute.torch.backend import TorchBackend

        return TorchBackend.of(device, config, model)
    if config.backend == "reference":
        return ReferenceBackend.of(config, model)
    try:
        from quire.compute.native.backend import NativeBackend
    except ImportError as error:
        if config.backend == "native":
            allowed = "reference: the compiled core cannot be imported; run quire doctor"
            raise InvalidConfigError("backend", "native", allowed) from error
        return ReferenceBackend.of(config, model)
    return NativeBackend.of(config, model)
