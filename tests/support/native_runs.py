"""Runs the compiled decoder through its worker, and keeps the logits of every position."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.compute.native import NativeSettings, kv_cache_spec
from quire.compute.native.load import make_parts
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.stacked import unstacked
from quire.compute.worker.cache_engine import CacheEngine
from quire.compute.worker.model_runner import ModelRunner, StepInputs, StepOutputs
from quire.compute.worker.worker import Worker
from support.reference_runs import ReferenceRun
from support.step_plans import PlanDriver

FLOAT32 = NativeSettings(dtype="float32", max_num_batched_tokens=256)


class EveryLogit:
    """A model runner that computes the logits of every token, and passes on those wanted."""

    def __init__(self, runner: ModelRunner) -> None:
        self.vocab_size = runner.vocab_size
        self.last: list[NDArray[np.float32]] = []
        self._runner = runner

    def run(self, inputs: StepInputs, cache: CacheEngine) -> StepOutputs:
        every = np.arange(len(inputs.token_ids))
        outputs = self._runner.run(replace(inputs, logit_indices=every), cache)
        logits, wanted = outputs.logits[:, : self.vocab_size].copy(), inputs.logit_indices
        self.last = [logits[inputs.tokens_of(s)] for s in range(len(inputs.entries))]
        return replace(outputs, logits=outputs.logits[wanted], finite_logits=outputs.finite_logits[wanted])


class NativeRun(ReferenceRun):
    """A worker of the compiled core over a model folder, driven by hand; KV memory starts poisoned."""

    def __init__(  # what differs from the reference is how the worker is made
        self,
        folder: Path,
        *,
        settings: NativeSettings = FLOAT32,
        block_size: int = 16,
        blocks: Iterable[int] | None = None,
        num_blocks: int = 64,
        num_host_blocks: int = 4,
        spec: DecoderSpec | None = None,
    ) -> None:
        spec = spec or read_model(ModelFolder(folder)).spec
        kv_spec = kv_cache_spec(spec, block_size, settings.stored_kv_dtype)
        cache = CacheEngine(kv_spec, num_blocks=num_blocks, num_host_blocks=num_host_blocks, poison=True)
        parts = make_parts(spec, unstacked(Checkpoint.open(folder)), settings, cache)
        self.runner = EveryLogit(parts.runner)  # type: ignore[assignment]
        self.worker = Worker(parts.with_runner(self.runner))
        self.worker.start()
        self.driver = PlanDriver.over(kv_spec, range(num_blocks) if blocks is None else blocks)
        self.logits = {}
