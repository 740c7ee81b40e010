"""Runs the torch decoder through its worker, and keeps the logits of every position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.compute.models import read_model
from quire.compute.models.base import DecoderSpec
from quire.compute.models.source import ModelFolder
from quire.compute.torch.attention.base import AttentionBackend
from quire.compute.torch.cache import TorchCache
from quire.compute.torch.load import LoadedModel, create_attention, load_decoder
from quire.compute.torch.runner import TorchRunner
from quire.compute.torch.settings import TorchSettings, kv_cache_spec
from quire.compute.weights.checkpoint import Checkpoint
from quire.compute.weights.decoder_weights import WeightReader
from quire.compute.weights.stacked import unstacked
from quire.compute.worker.model_runner import StepInputs, StepOutputs
from quire.compute.worker.worker import Worker
from support.reference_runs import ReferenceRun
from support.step_plans import PlanDriver

FLOAT32 = TorchSettings(device="cpu", dtype="float32")


@contextmanager
def poisoned() -> Iterator[None]:
    """Let torch fill all that it allocates with what is no number, and with the highest integer.

    On a GPU only around kernels of our own: cuBLAS wants to be asked in another way for what torch takes that to mean.
    """
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class EveryLogit:
    """A model runner that computes the logits of every token, and passes on those wanted."""

    def __init__(self, runner: TorchRunner) -> None:
        self.vocab_size = runner.vocab_size
        self.last: list[NDArray[np.float32]] = []
        self._runner = runner

    def run(self, inputs: StepInputs, cache: TorchCache) -> StepOutputs:
        every = np.arange(len(inputs.token_ids))
        outputs = self._runner.run(replace(inputs, logit_indices=every, logit_starts=inputs.query_starts), cache)
        logits, wanted = outputs.logits.float().cpu().numpy(), inputs.logit_indices
        self.last = [logits[inputs.tokens_of(s)].copy() for s in range(len(inputs.entries))]
        chosen = outputs.logits[torch.from_numpy(wanted).to(outputs.logits.device)]
        return replace(outputs, logits=chosen, finite_logits=outputs.finite_logits[wanted])


class TorchRun(ReferenceRun):
    """A worker of torch over a model folder, driven by hand; KV memory starts poisoned."""

    def __init__(  # what differs from the reference is how the worker is made
        self,
        folder: Path,
        *,
        settings: TorchSettings = FLOAT32,
        blocks: Iterable[int] | None = None,
        num_blocks: int = 64,
        num_host_blocks: int = 4,
        spec: DecoderSpec | None = None,
        attention: AttentionBackend[Any] | None = None,
    ) -> None:
        spec = spec or read_model(ModelFolder(folder)).spec
        kv_spec = kv_cache_spec(spec, settings)
        cache = TorchCache(
            kv_spec,
            attention or create_attention(spec, settings),
            torch.device(settings.device),
            num_blocks=0,
            poison=True,
        )
        reader = WeightReader(spec, unstacked(Checkpoint.open(folder)), "float32", settings.weights)
        decoder = load_decoder(spec, reader, settings, cache)
        parts = LoadedModel(decoder, cache, settings, frozenset()).parts(num_blocks, num_host_blocks)
        self.runner = EveryLogit(parts.runner)  # type: ignore[assignment]
        self.worker = Worker(parts.with_runner(self.runner))
        self.worker.start()
        self.driver = PlanDriver.over(kv_spec, range(num_blocks) if blocks is None else blocks)
        self.logits = {}
