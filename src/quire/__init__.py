"""quire serves large language models from paged KV memory.

The names below are the public API. Each is imported from its module on first use, so `import quire` is cheap and
imports only the standard library.

    models     LLM, AsyncLLM, EngineConfig, SamplingParams    a folder in, text out
    outputs    RequestOutput, CompletionOutput, Logprob, RequestMetrics
    memory     KVCacheSpec, MemoryConfig, KVCacheManager      paged KV memory on its own, for any engine
    requests   Request, CacheScope, FinishReason, Grammar
    engine     SchedulerConfig, RequestLimits, Scheduler, EngineCore
    errors     QuireError and its subclasses                  drawn as a tree in quire.core.errors

>>> from quire import KVCacheManager, KVCacheSpec, MemoryConfig, Request
>>> spec = KVCacheSpec.from_layers([None] * 28, block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
>>> manager = KVCacheManager(spec, MemoryConfig(num_blocks=64))
>>> request = Request("r", range(35))
>>> manager.allocate_slots(request, 35), manager.block_tables(request)
(True, [[0, 1, 2]])
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022 - in the order of dir()
    "AsyncLLM",
    "CacheScope",
    "CheckpointError",
    "CompletionOutput",
    "DoesNotFitError",
    "EngineConfig",
    "EngineCore",
    "ExecutionError",
    "ExecutorLostError",
    "FinishReason",
    "Grammar",
    "InvalidConfigError",
    "InvalidRequestError",
    "InvalidValueError",
    "InvariantError",
    "KVCacheManager",
    "KVCacheSpec",
    "LLM",
    "Logprob",
    "MemoryConfig",
    "ModelError",
    "OutOfMemoryError",
    "QuireError",
    "Request",
    "RequestLimits",
    "RequestMetrics",
    "RequestOutput",
    "RequestStateError",
    "RequestTooLargeError",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "StaleMatchError",
    "StepLogError",
    "TooManyJobsError",
    "TornStepLogError",
    "UnknownRequestError",
]

if TYPE_CHECKING:
    from quire.core.config import EngineConfig, MemoryConfig, SchedulerConfig
    from quire.core.errors import (
        CheckpointError,
        DoesNotFitError,
        ExecutionError,
        ExecutorLostError,
        InvalidConfigError,
        InvalidRequestError,
        InvalidValueError,
        InvariantError,
        ModelError,
        OutOfMemoryError,
        QuireError,
        RequestStateError,
        RequestTooLargeError,
        StaleMatchError,
        StepLogError,
        TooManyJobsError,
        TornStepLogError,
        UnknownRequestError,
    )
    from quire.core.grammar import Grammar
    from quire.core.kv_spec import KVCacheSpec
    from quire.core.request import CacheScope, FinishReason, Request
    from quire.core.sampling_params import SamplingParams
    from quire.core.validate import RequestLimits
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.core import EngineCore
    from quire.engine.llm import LLM
    from quire.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from quire.memory.manager import KVCacheManager
    from quire.scheduler.scheduler import Scheduler

_HOMES = {
    "AsyncLLM": "quire.engine.async_llm",
    "CacheScope": "quire.core.request",
    "CompletionOutput": "quire.engine.outputs",
    "EngineConfig": "quire.core.config",
    "EngineCore": "quire.engine.core",
    "FinishReason": "quire.core.request",
    "Grammar": "quire.core.grammar",
    "KVCacheManager": "quire.memory.manager",
    "KVCacheSpec": "quire.core.kv_spec",
    "LLM": "quire.engine.llm",
    "Logprob": "quire.engine.outputs",
    "MemoryConfig": "quire.core.config",
    "OutOfMemoryError": "quire.core.errors",
    "Request": "quire.core.request",
    "RequestLimits": "quire.core.validate",
    "RequestMetrics": "quire.engine.outputs",
    "RequestOutput": "quire.engine.outputs",
    "SamplingParams": "quire.core.sampling_params",
    "Scheduler": "quire.scheduler.scheduler",
    "SchedulerConfig": "quire.core.config",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES.get(name, "quire.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
