"""The factory: the only file that wires the control plane to the compute plane.

model folder ──► DecoderSpec ──► KVCacheSpec ──► KVCacheManager ──► Scheduler ──┐
                      └────────► weights, KV arrays ──► Worker (an Executor) ───┴──► EngineCore
"""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path

from quire.compute.models import read_model
from quire.compute.reference import load_worker
from quire.core.clock import SystemClock
from quire.core.config import MemoryConfig, SchedulerConfig
from quire.core.validate import RequestLimits
from quire.engine.core import EngineCore
from quire.engine.step_log import StepLogWriter
from quire.memory.manager import KVCacheManager
from quire.memory.sizing import max_sequence_tokens
from quire.scheduler.scheduler import Scheduler


def create_reference_engine(
    model_folder: Path,
    *,
    block_size: int = 16,
    memory: MemoryConfig | None = None,
    scheduler: SchedulerConfig | None = None,
    log: StepLogWriter | None = None,
) -> EngineCore:
    """Return an engine that runs a model folder with the reference decoder, greedily, in this process.

    Raises `CheckpointError` for a folder that cannot be run; nothing is allocated then.
    """
    memory, scheduler = memory or MemoryConfig(), scheduler or SchedulerConfig()
    if not memory.hash_key:
        memory = replace(memory, hash_key=secrets.token_bytes(32))
    model = read_model(model_folder)
    spec = model.spec.kv_cache_spec(block_size)
    worker = load_worker(
        model_folder, block_size=block_size, num_blocks=memory.num_blocks, num_host_blocks=memory.num_host_blocks
    )
    limits = RequestLimits(
        vocab_size=model.spec.vocab_size,
        max_model_len=min(scheduler.max_model_len, model.spec.context_length),
        max_sequence_tokens=max_sequence_tokens(
            memory.num_blocks, spec, longest_chunk=1 + scheduler.max_steps_under_way
        ),
        max_num_seqs=scheduler.max_num_seqs,
        beam_search=False,
    )
    control = Scheduler(scheduler, KVCacheManager(spec, memory), limits, eos_token_ids=frozenset(model.eos_token_ids))
    return EngineCore(control, worker, SystemClock(), log=log)
