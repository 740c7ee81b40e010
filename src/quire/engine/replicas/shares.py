"""The share of a machine that each of several engines gets.

On a CPU, threads and memory are divided equally, so that all engines together use what one would use. On GPUs, each
engine has its own GPU, or one for each of its ranks, with all of the GPU's memory; the host's memory is divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.core.config import EngineConfig
from quire.core.granted import with_gpus
from quire.core.memory_needs import UNKNOWN_FREE_BYTES

if TYPE_CHECKING:
    from quire.engine.factory import EngineBlueprint


def share_of(blueprint: EngineBlueprint, num_replicas: int) -> EngineConfig:
    """Return the settings of each of several engines that together use what one engine would use. Pure."""
    config, facts, needs = blueprint.config, blueprint.backend.facts, blueprint.report.plan.needs
    if num_replicas == 1:
        return config
    share = replace(
        config,
        swap_space=int(config.swap_space) // num_replicas,
        disk_cache_size=int(config.disk_cache_size) // num_replicas,
    )
    if facts.device != "cpu":
        return replace(share, device="cuda")  # an engine without its own GPU then raises an error
    free = UNKNOWN_FREE_BYTES if needs.free_bytes is None else needs.free_bytes
    return replace(
        share,
        num_threads=max(1, facts.num_threads // num_replicas) if facts.num_threads else config.num_threads,
        max_memory=min(free, int(config.max_memory or free)) // num_replicas,
        kv_memory=None if config.kv_memory is None else int(config.kv_memory) // num_replicas,
    )


def environment_of(config: EngineConfig, index: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an engine, with which it sees only its own of the visible GPUs. Pure.

    >>> environment_of(EngineConfig(device="cuda"), 1, {"CUDA_VISIBLE_DEVICES": "4,6"})
    {'CUDA_VISIBLE_DEVICES': '6'}
    >>> environment_of(EngineConfig(device="cuda", tensor_parallel=2), 1, {})
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    """
    if config.device != "cuda":
        return dict(environ)
    return with_gpus(environ, index * config.tensor_parallel, config.tensor_parallel)
