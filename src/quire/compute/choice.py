"""Chooses a backend: the GPU if one is usable, otherwise the compiled core, otherwise the reference.

Only the chosen one is imported, because imports are most of the time that a small model takes to start.
"""

from __future__ import annotations

import os
from dataclasses import replace

from quire.compute.backend import Backend
from quire.compute.models import ModelDescription
from quire.compute.models.config_file import MAX_LENGTH
from quire.core.config import EngineConfig, ResolvedConfig
from quire.core.errors import InvalidConfigError
from quire.core.kv_spec import USUAL_BLOCK_SIZE


def choose_backend(config: EngineConfig, model: ModelDescription) -> tuple[Backend, str]:
    """Return the backend for a model, and a notice that explains why it is not the GPU; empty if there is none.

    Checks the GPU if it may be used. Reads no files: the backend looks for the weights when it loads them.
    Raises `InvalidConfigError` for settings that do not fit the model or this machine.
    """
    if config.device == "cpu" or config.backend in ("native", "reference"):
        return backend_on("cpu", resolved_for(model, config), model), ""
    from quire.compute.torch.device import look

    gpu = look(os.environ, config.tensor_parallel)
    if gpu.gpu is None and config.device == "auto":
        return backend_on("cpu", resolved_for(model, config), model), ""
    from quire.compute.torch.backend import TorchBackend

    on_gpu, notice = TorchBackend.on_gpu(gpu, config, model)
    return on_gpu or backend_on("cpu", resolved_for(model, config), model), notice


def resolved_for(model: ModelDescription, config: EngineConfig, gpu_bytes: int | None = None) -> ResolvedConfig:
    """Return the settings of an engine for a model; `gpu_bytes`: the memory of a GPU, None: on a CPU. Pure."""
    resolved = config.resolved(gpu_bytes, usual_block_size(model, config))
    return _in_one_step(resolved, config, model) if model.spec.attention.bidirectional else resolved


def _in_one_step(resolved: ResolvedConfig, config: EngineConfig, model: ModelDescription) -> ResolvedConfig:
    """Return the settings for a model whose tokens attend to later ones: a step takes the longest text, or cuts it."""
    for cache in ("disk_cache", "host_cache"):
        if getattr(config, cache):
            raise InvalidConfigError(cache, getattr(config, cache), "none: this model cannot reuse blocks of a prompt")
    longest = min(config.max_model_len or model.longest_text or MAX_LENGTH, model.spec.context_length)
    tokens = resolved.max_num_batched_tokens
    resolved = replace(resolved, enable_prefix_caching=False, one_step=True)
    if longest < model.spec.context_length:
        resolved = replace(resolved, max_model_len=longest)
    if config.max_num_batched_tokens is None:
        return replace(resolved, max_num_batched_tokens=max(tokens, longest))
    return resolved if longest <= tokens else replace(resolved, max_model_len=tokens)


def usual_block_size(model: ModelDescription, config: EngineConfig) -> int:
    """Return the size of blocks that suits a model, for settings that name none. Pure."""
    dtype = config.kv_dtype
    if dtype == "auto":
        computed = model.dtype if config.dtype == "auto" else config.dtype
        dtype = "float32" if computed == "float32" else "bfloat16"
    return model.spec.kv_cache_spec(USUAL_BLOCK_SIZE, dtype).usual_block_size


def missing_on_gpus(model: ModelDescription) -> str:
    """Return what a model has that the engine for GPUs does not run; empty if it runs the model. Pure."""
    from quire.compute.torch.missing import missing

    return missing(model.spec)


def backend_on(device: str, config: ResolvedConfig, model: ModelDescription) -> Backend:
    """Return the backend for cpu or cuda, even if this machine lacks it; raises for settings that do not fit."""
    if config.tensor_parallel > 1 and config.backend != "torch":
        allowed = f"1 with backend {config.backend}: only torch computes with several ranks"
        raise InvalidConfigError("tensor_parallel", config.tensor_parallel, allowed)
    if device == "cuda" or config.backend == "torch":
        from quire.compute.torch.backend import TorchBackend

        return TorchBackend.of(device, config, model)
    if config.backend == "reference":
        return _reference(config, model)
    try:
        from quire.compute.native.backend import NativeBackend
    except ImportError as error:
        if config.backend == "native":
            allowed = "reference: the compiled core cannot be imported; run quire doctor"
            raise InvalidConfigError("backend", "native", allowed) from error
        return _reference(config, model)
    return NativeBackend.of(config, model)


def _reference(config: ResolvedConfig, model: ModelDescription) -> Backend:
    from quire.compute.reference.backend import ReferenceBackend

    return ReferenceBackend.of(config, model)
